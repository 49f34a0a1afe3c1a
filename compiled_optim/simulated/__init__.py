"""A step on a simulated GPU: the kernels that Triton compiles, the launches, and the assembler's report."""
