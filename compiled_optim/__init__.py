"""compiled_optim: PyTorch optimizers for training steps that are compiled, captured and scheduled.

The parts are floors of a house: a module imports only from its own floor and from floors below. From the top:

    __main__.py          ``python -m compiled_optim``
    cli/                 the commands of compiled-optim, a module each
    interop/             optimizers, state dicts and files of other packages; a module for each package
    simulated/           a step on a simulated GPU: kernels, launches, registers
    capture/             training steps as CUDA graphs
    reports/             reports of an optimizer: its compiled code, bytes, rules and numbers, health; their findings
    full_precision.py    float32 weights of 16-bit models
    catalogue.py         optimizers by name: made, listed, described
    by_name.py           state dicts by parameter name, of several optimizers together
    release.py           gradient release: updates inside of backward, which then frees the gradients
    step_module.py       the step as a module, for training steps that are compiled into a file
    optimizers/          one optimizer per file: its fields and its rule, functions that define the update
    optimizer.py         CompiledOptimizer: torch.optim's interface over groups, state and plans
    saved_optimizer.py   its part about groups and state: read, saved, loaded, copied
    model.py             a model's parameters by name: groups for an optimizer, and dtypes
    step/                the engine, which owns groups and state and runs steps; a step, made of plans
    lowering/            the ways to run a plan: kernels, torch operations, stacks, sparse rows
    plan/                a plan: parameters that are updated together; keys of kernels, clipping, schedules
    checkpoint/          state dicts: read, match, check, write; the checkpoints of other packages
    state.py             the state of each parameter, and how it is stored
    groups/              parameter groups: hyperparameter tensors, names, parameters
    rule/                the language of an optimizer's file: fields, vocabulary; the rule that is made of them
    memory/              addresses, memory order, shards, compiled code and its cache, torch's parts without a public name
"""

import importlib
from typing import TYPE_CHECKING, Any

from compiled_optim.by_name import load_named_state_dict, named_state_dict
from compiled_optim.capture.runner import CUDAGraphRunner
from compiled_optim.catalogue import OptimizerInfo, create, list_optimizers, named, optimizer_info
from compiled_optim.checkpoint.state_dict import LoadReport
from compiled_optim.full_precision import full_precision_state_dict, load_full_precision_state_dict
from compiled_optim.model import param_groups, to_low_precision
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.plan.compilations import RecompileError, no_recompiles
from compiled_optim.release import prepare_for_gradient_release, remove_gradient_release

if TYPE_CHECKING:
    from compiled_optim.interop.from_torch import from_torch
    from compiled_optim.interop.optimi import optimi_state_dict
    from compiled_optim.optimizers import mup
    from compiled_optim.optimizers.adadelta import Adadelta
    from compiled_optim.optimizers.adafactor import Adafactor
    from compiled_optim.optimizers.adagrad import Adagrad
    from compiled_optim.optimizers.adam import Adam
    from compiled_optim.optimizers.adamax import Adamax
    from compiled_optim.optimizers.adamw import AdamW
    from compiled_optim.optimizers.adamw_schedule_free import AdamWScheduleFree
    from compiled_optim.optimizers.adan import Adan
    from compiled_optim.optimizers.ademamix import AdEMAMix
    from compiled_optim.optimizers.adopt import ADOPT
    from compiled_optim.optimizers.asgd import ASGD
    from compiled_optim.optimizers.lamb import LAMB
    from compiled_optim.optimizers.lbfgs import LBFGS
    from compiled_optim.optimizers.lion import Lion
    from compiled_optim.optimizers.mars import MARS
    from compiled_optim.optimizers.muon import Muon
    from compiled_optim.optimizers.muon_adamw import MuonAdamW
    from compiled_optim.optimizers.nadam import NAdam
    from compiled_optim.optimizers.nor_muon import NorMuon
    from compiled_optim.optimizers.prodigy import Prodigy
    from compiled_optim.optimizers.radam import RAdam
    from compiled_optim.optimizers.ranger import Ranger
    from compiled_optim.optimizers.rmsprop import RMSprop
    from compiled_optim.optimizers.rprop import Rprop
    from compiled_optim.optimizers.sgd import SGD
    from compiled_optim.optimizers.signum import Signum
    from compiled_optim.optimizers.sparse_adam import SparseAdam
    from compiled_optim.optimizers.stable_adamw import StableAdamW
    from compiled_optim.reports.compile import CompileReport, compile_report
    from compiled_optim.reports.explain import Explanation, explain
    from compiled_optim.reports.finding import Finding
    from compiled_optim.reports.health import HealthReport, health
    from compiled_optim.reports.memory import MemoryReport, memory_report
    from compiled_optim.reports.numerics import NumericsReport, check_numerics
    from compiled_optim.step_module import as_module

__version__ = "0.1.0"

__all__ = [
    "ADOPT",
    "ASGD",
    "LAMB",
    "LBFGS",
    "MARS",
    "SGD",
    "AdEMAMix",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWScheduleFree",
    "Adamax",
    "Adan",
    "CUDAGraphRunner",
    "CompileReport",
    "CompiledOptimizer",
    "Explanation",
    "Finding",
    "HealthReport",
    "Lion",
    "LoadReport",
    "MemoryReport",
    "Muon",
    "MuonAdamW",
    "NAdam",
    "NorMuon",
    "NumericsReport",
    "OptimizerInfo",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "Ranger",
    "RecompileError",
    "Rprop",
    "Signum",
    "SparseAdam",
    "StableAdamW",
    "as_module",
    "check_numerics",
    "compile_report",
    "create",
    "explain",
    "from_torch",
    "full_precision_state_dict",
    "health",
    "list_optimizers",
    "load_full_precision_state_dict",
    "load_named_state_dict",
    "memory_report",
    "mup",
    "named_state_dict",
    "no_recompiles",
    "optimi_state_dict",
    "optimizer_info",
    "param_groups",
    "prepare_for_gradient_release",
    "remove_gradient_release",
    "to_low_precision",
]

_LAZY = {
    "CompileReport": "compiled_optim.reports.compile",
    "Explanation": "compiled_optim.reports.explain",
    "Finding": "compiled_optim.reports.finding",
    "HealthReport": "compiled_optim.reports.health",
    "MemoryReport": "compiled_optim.reports.memory",
    "NumericsReport": "compiled_optim.reports.numerics",
    "as_module": "compiled_optim.step_module",
    "check_numerics": "compiled_optim.reports.numerics",
    "compile_report": "compiled_optim.reports.compile",
    "explain": "compiled_optim.reports.explain",
    "from_torch": "compiled_optim.interop.from_torch",
    "health": "compiled_optim.reports.health",
    "memory_report": "compiled_optim.reports.memory",
    "optimi_state_dict": "compiled_optim.interop.optimi",
}
"""The modules of public names that are imported at their first use. No module beside this one may have such a name."""

if not TYPE_CHECKING:  # else, to type checkers, the module would have every name

    def __getattr__(name: str) -> Any:
        """Import an optimizer, ``mup`` or a name of ``_LAZY`` at its first use: few programs use many, each takes time."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _LAZY:
            value = getattr(importlib.import_module(_LAZY[name]), name)
        else:
            value = importlib.import_module("compiled_optim.optimizers.mup") if name == "mup" else named(name)[1]
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
