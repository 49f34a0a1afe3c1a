"""The optimizers once more, as their papers and torch.optim's documentation have them: slowly, in float64.

A module per optimizer, with two functions of one tensor: ``start`` makes its state, and ``step`` changes state and parameter
in place. ``h`` holds the hyperparameters and choices by name, ``t`` counts the tensor's steps from 1 on.
"""
