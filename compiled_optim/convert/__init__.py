"""Conversion of checkpoint files between this package and others, without the model: see :func:`convert`."""

from compiled_optim.convert.formats import READ, WRITTEN, Converted, convert, read, write

__all__ = ["READ", "WRITTEN", "Converted", "convert", "read", "write"]
