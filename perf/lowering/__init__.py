"""The code that a step lowers to, without a GPU: kernels, launches, memory traffic, registers."""
