"""A step on a GPU that is not there: what Triton makes of its kernels, what it launches, and what the assembler says."""
