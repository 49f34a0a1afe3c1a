"""Benchmarks of compiled_optim against torch.optim: ``python -m perf --help``."""
