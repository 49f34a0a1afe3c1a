"""Codes that FlashOptim's own kernels make of a state, in Triton's interpreter; a process of its own, TRITON_INTERPRET=1.

The argument is a folder, with what ``torch.save`` made of a state dict in ``plain.pt``; ``coded.pt`` becomes what FlashOptim
saves on a GPU of it, and ``decoded.pt`` what its kernel decodes.
"""

import sys
from pathlib import Path

import flashoptim.optimizers as flash
import torch

FORMS = {
    "exp_avg": {"signed": True, "sqrt": False, "softsign": True},
    "exp_avg_sq": {"signed": False, "sqrt": True, "softsign": False},
}


def main(folder: Path) -> None:
    flash._get_sm_count = lambda device=None: 1
    for kernel in (flash._triton_quantize_kernel, flash._triton_dequantize_kernel):
        kernel.configs = kernel.configs[:1]  # where nothing is timed
    saved = torch.load(folder / "plain.pt")
    decoded = {}
    for param, entries in saved["state"].items():
        for name, form in FORMS.items():
            codes, scales = flash.quantize(entries.pop(name).contiguous(), **form)
            decoded[param, name] = flash.dequantize(codes, scales, **form)
            entries[f"{name}::quantized"] = codes
            entries[f"{name}::scales"] = scales.view(torch.bfloat16) if param else scales  # as with bfloat16 parameters
    torch.save(saved, folder / "coded.pt")
    torch.save(decoded, folder / "decoded.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
