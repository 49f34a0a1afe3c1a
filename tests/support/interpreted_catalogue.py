"""The multi-tensor lowering's Triton kernels beside the eager lowering, for cases of the catalogue.

Every parameter has a scale of its own. The second step is clipped, the third one skipped.
"""

from __future__ import annotations

import torch
from catalog import Case, cases, relative_error

DTYPES = {"float32": torch.float32, "float64": torch.float64, "complex64": torch.complex64}

LARGE = (44, 95)
"""Four whole blocks and one of 84 elements; of a gradient, two that are reduced at a time."""


def dtypes_of(case: Case, only_float32: bool) -> list[str]:
    """In which a case runs.

    A complex tensor is one of twice as many real numbers to a kernel, which has the same text and dtype, so that no value of
    a hyperparameter matters to it: the optimizer's second case, the first that has all hyperparameters, stands for others.
    """
    if only_float32 or not case.arguments:
        return ["float32"]
    second = next(c for c in cases() if c.optimizer is case.optimizer and c.arguments)
    return [name for name, dtype in DTYPES.items() if not dtype.is_complex or (case == second and case.takes_complex)]


def interpreted(dtypes: str, *names: str) -> dict[str, float]:
    """Return the largest relative difference from the eager lowering, by case and dtype, of all or of ``float32`` alone."""
    errors = {}
    for case in (case for case in cases() if str(case) in names):
        for name in dtypes_of(case, dtypes == "float32"):
            results = []
            for lowering in ("multi_tensor", "eager"):
                params = case.parameters(DTYPES[name], LARGE)
                scales = {f"p{i}": 1 / (i + 0.5) for i in range(len(params))}
                named = zip(scales, params, strict=True)
                optimizer = case.optimizer(named, lowering=lowering, lr_scale=scales, **case.kwargs)
                for step in range(4):
                    case.give_gradients(params, params, step, absent=3)
                    optimizer.max_grad_norm = 0.7 if step == 1 else None
                    optimizer.found_inf = torch.tensor(float(step == 2))
                    optimizer.step()
                assert optimizer.skipped_steps.item() == 1
                state = [v for s in optimizer.state.values() for v in s.values()]
                results.append((params, state))
            (ours, our_state), (expected, expected_state) = results
            errors[f"{case}-{name}"] = max(relative_error(ours, expected), relative_error(our_state, expected_state))
    return errors
