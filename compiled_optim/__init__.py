"""compiled_optim: PyTorch optimizers for training steps that are compiled, captured and scheduled."""

from compiled_optim.checkpoint import LoadReport
from compiled_optim.events import RecompileError
from compiled_optim.guards import CompileReport, compile_report, no_recompiles
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers.adamw import AdamW
from compiled_optim.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "CompileReport",
    "CompiledOptimizer",
    "LoadReport",
    "RecompileError",
    "compile_report",
    "no_recompiles",
]
