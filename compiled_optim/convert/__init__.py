"""Checkpoints of other packages and ours, from file to file, without the model: see :func:`convert`."""

from compiled_optim.convert.formats import READ, WRITTEN, Converted, convert, read, write

__all__ = ["READ", "WRITTEN", "Converted", "convert", "read", "write"]
