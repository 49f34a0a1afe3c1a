from compiled_optim.optimizers.lbfgs.lbfgs import LBFGS as LBFGS
