"""compiled_optim: PyTorch optimizers for training steps that are compiled, captured and scheduled."""

from compiled_optim.capture import CUDAGraphRunner
from compiled_optim.checkpoint import LoadReport
from compiled_optim.events import RecompileError
from compiled_optim.guards import CompileReport, compile_report, no_recompiles
from compiled_optim.named import load_named_state_dict, named_state_dict
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers.adadelta import Adadelta
from compiled_optim.optimizers.adafactor import Adafactor
from compiled_optim.optimizers.adagrad import Adagrad
from compiled_optim.optimizers.adam import Adam
from compiled_optim.optimizers.adamax import Adamax
from compiled_optim.optimizers.adamw import AdamW
from compiled_optim.optimizers.asgd import ASGD
from compiled_optim.optimizers.lbfgs import LBFGS
from compiled_optim.optimizers.lion import Lion
from compiled_optim.optimizers.muon import Muon
from compiled_optim.optimizers.nadam import NAdam
from compiled_optim.optimizers.radam import RAdam
from compiled_optim.optimizers.rmsprop import RMSprop
from compiled_optim.optimizers.rprop import Rprop
from compiled_optim.optimizers.sgd import SGD
from compiled_optim.optimizers.sparse_adam import SparseAdam

__all__ = [
    "ASGD",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CUDAGraphRunner",
    "CompileReport",
    "CompiledOptimizer",
    "Lion",
    "LoadReport",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "RecompileError",
    "Rprop",
    "SparseAdam",
    "compile_report",
    "load_named_state_dict",
    "named_state_dict",
    "no_recompiles",
]
