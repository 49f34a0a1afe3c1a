"""Uses of every public name, for type checkers, which must report the lines that end in ``# error`` and no others."""

import io
from typing import Literal, assert_type

import torch
from torch import Tensor, nn

import compiled_optim as co


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def optimizers(model: Model) -> list[co.CompiledOptimizer]:
    params, named = model.parameters(), model.named_parameters()
    matrices = [model.layer.weight]
    return [
        co.ADOPT(params, decoupled_weight_decay=True),
        co.ASGD(params, lr=0.1, lambd=1e-4),
        co.AdEMAMix(params, betas=(0.9, 0.999, 0.9999), t_alpha=1000, t_beta3=1000),
        co.Adadelta(params, rho=0.9),
        co.Adafactor(params, eps=(None, 1e-3), factored_dims="largest"),
        co.Adagrad(params, lr_decay=0.1),
        co.Adam(params, 1e-3, (0.9, 0.99), amsgrad=True),
        co.AdamW(named, lr=torch.tensor(1e-3), weights="split8", state_dtype="int8", exclude=("*.bias",)),
        co.AdamWScheduleFree(params, warmup_steps=10, state_dtype={"z": torch.float32}),
        co.Adamax(params, state_dtype=torch.bfloat16),
        co.Adan(params, 1e-3, betas=(0.98, 0.92, 0.99)),
        co.LAMB(params, lowering="eager"),
        co.LBFGS(params, line_search_fn="strong_wolfe"),
        co.Lion(params, 1e-4, cautious=True),
        co.MARS(params, gamma=0.025),
        co.Muon(matrices, ns_coefficients="polar_express", split={"*qkv*": 3}),
        co.MuonAdamW(named, adamw_lr=1e-3),
        co.NAdam(params, momentum_decay=4e-3),
        co.NorMuon(matrices, nesterov=True),
        co.Prodigy(params, d_coef=2.0),
        co.RAdam(params, max_grad_norm=1.0, skip_nonfinite=True),
        co.RMSprop(params, centered=True),
        co.Ranger(params, 1e-3, k=5),
        co.Rprop(params, etas=(0.5, 1.2)),
        co.SGD([{"params": params, "lr": 0.1}], momentum=0.9, lr_scale={"layer.weight": 2.0}),
        co.Signum(params, 1e-4, momentum=0.9),
        co.SparseAdam(params),
        co.StableAdamW(params, 1e-3, kahan_sum=True, rounding_seed=1),
        co.mup.AdamW(params, allow_non_unit_scaling_params=True),
        co.create("adamw", model, lr=1e-3),
    ]


def one(model: Model) -> None:
    assert_type(co.to_low_precision(model, keep={nn.LayerNorm: None}), Model)
    optimizer = co.AdamW(co.param_groups(model, {"*.bias": {"weight_decay": 0.0}}), lr=1e-3)
    assert_type(optimizer.hyperparameter("lr"), Tensor)
    assert_type(optimizer.hyperparameter("betas"), tuple[Tensor, ...])
    assert_type(optimizer.step(lambda: 1.0), float)
    optimizer.step()
    optimizer.zero_grad()
    assert_type(optimizer.grad_norm, Tensor | None)
    assert_type(optimizer.skipped_steps, Tensor)
    optimizer.schedule(lr=lambda step: 1e-3 / step, group=0)
    assert_type(optimizer.load_state_dict(optimizer.state_dict(), strict=False), co.LoadReport)
    assert_type(co.check_numerics(optimizer), co.NumericsReport)
    assert_type(co.as_module(optimizer).names, list[str])
    optimizer.watch_health()
    health: co.HealthReport = co.health(optimizer, least_steps=3)
    assert_type(health.findings, tuple[co.Finding, ...])
    print(health, optimizer.hyperparameters()[0]["lr"])
    average = co.AdamWScheduleFree(model.parameters())
    average.eval()
    average.train()


def functions(model: Model) -> None:
    optimizer = co.SGD(model.named_parameters(), lr=0.1)
    try:
        with co.no_recompiles(budget=1):
            optimizer.step()
    except co.RecompileError as error:
        print(error)
    assert_type(co.compile_report(optimizer), co.CompileReport)
    assert_type(co.memory_report(optimizer).per_parameter, float)
    memory: co.MemoryReport = co.memory_report(optimizer)
    explanation: co.Explanation = co.explain(model, optimizer)
    print(memory, explanation)
    co.prepare_for_gradient_release(model, optimizer)
    co.remove_gradient_release(model)
    saved = co.named_state_dict([optimizer])
    assert_type(co.load_named_state_dict(optimizer, saved, hyperparameters="keep"), co.LoadReport)
    weights = co.full_precision_state_dict(model, optimizer)
    co.load_full_precision_state_dict(model, optimizer, weights)
    torch.save(co.optimi_state_dict(optimizer), io.BytesIO())

    def train(batch: Tensor) -> Tensor:
        loss: Tensor = model.layer(batch)
        return loss

    runner = co.CUDAGraphRunner(train, optimizers=optimizer)
    runner(torch.ones(4))
    live = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(live, 1)
    assert_type(co.from_torch(live, schedulers=[schedule], weights="kahan"), co.CompiledOptimizer)
    info: co.OptimizerInfo = co.optimizer_info(co.list_optimizers("*adam*")[0])
    assert_type(info.bytes_per_parameter["float32"], float)
    assert_type(info.arguments[0].name, str)


def mistakes(model: Model, lowering: Literal["eager", "auto"]) -> None:
    params = model.parameters()
    co.SGD(params, lowering=lowering)
    co.AdamW(params, weights="int4")  # error
    co.AdamW(params, lowering="triton")  # error
    co.AdamW(params, state_dtype="int4")  # error
    co.AdamW(params, state_dtype={"exp_avg": "bfloat16"})  # error
    co.AdamW(params, learning_rate=1e-3)  # error
    co.AdamW(params, lr="1e-3")  # error
    co.Muon(params, nesterov="yes")  # error
    co.create("adamw")  # error
    co.to_low_precision("model")  # error
    co.AdamW(params).hyperparameter("lr")[0].backward(1, 2, 3, 4, 5)  # error
    co.AdamW(params).load_state_dict({}, hyperparameters="drop")  # error
    co.Adamw(params)  # error
    co.list_optimizers(3)  # error
    model = co.to_low_precision(nn.Linear(2, 2))  # error
