"""What a step lowers to, found without a GPU: kernels, launches, memory traffic, registers."""
