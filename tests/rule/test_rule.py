"""A rule outside of the package: what a class statement makes of it, and how its mistakes are answered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from catalog import registry

import compiled_optim as co
from compiled_optim.rule import (
    Accumulation,
    buffer,
    fact,
    floor,
    hyper,
    identity,
    maximum,
    scalar,
    sign,
    sqrt,
    static,
    total,
)


def make(**body: Any) -> type[co.CompiledOptimizer]:
    """A class of SGD's rule with another body."""

    def coefficients(lr):
        return dict(lr=lr)

    def update(param, grad, c):
        return dict(step=c.lr * grad)

    functions = {"coefficients": coefficients, "update": update}
    fields = {"lr": hyper(default=0.1)}
    body = {**fields, **functions, **body}
    made = {k: staticmethod(v) if k in functions else v for k, v in body.items() if v is not None}
    return type("Mine", (co.CompiledOptimizer,), made)


def results(optimizer: type[co.CompiledOptimizer], lowering: str, value: float = 2.0) -> list[float]:
    param = torch.nn.Parameter(torch.tensor([value]))
    made = optimizer([param], lowering=lowering)
    param.grad = torch.tensor([-3.0])
    made.step()
    return param.tolist()


def both(optimizer: type[co.CompiledOptimizer]) -> float:
    (compiled,), (eager,) = results(optimizer, "multi_tensor"), results(optimizer, "eager")
    assert compiled == pytest.approx(eager, rel=1e-6)
    return compiled


class TestWhatWorks:
    def test_powers_and_absolute_values(self) -> None:
        def update(param, grad, c):
            return dict(step=param - abs(grad) ** 2 - 2**param - param**0.5)

        assert both(make(update=update)) == pytest.approx(9 + 4 + math.sqrt(2))

    def test_helpers_and_closures(self) -> None:
        factor = 5.0

        def scaled(x):
            return sign(x) * factor

        def update(param, grad, c):
            return dict(param=scaled(grad), step=-sqrt(maximum(param, 0.0)))

        assert both(make(update=update)) == pytest.approx(-5 + math.sqrt(2))

    def test_a_lambda(self) -> None:
        assert both(make(update=lambda param, grad, c: {"step": -sign(grad)})) == 1.0

    def test_names_in_any_order(self) -> None:
        def coefficients(b, a, total, step):
            return dict(total=total + a, wanted=a - b, idle=step)

        def update(c, second, grad, first, param):
            return dict(second=first + 1, param=param * c.wanted, first=grad, step=0 * grad)

        fields = {"a": hyper(default=7.0), "b": hyper(default=4.0), "total": scalar(init=1.0)}
        mine = make(coefficients=coefficients, update=update, first=buffer(), second=buffer(init=3.0), **fields)
        for lowering in ("multi_tensor", "inductor", "eager"):
            param = torch.nn.Parameter(torch.tensor([2.0]))
            made = mine([param], lowering=lowering)
            param.grad = torch.tensor([-3.0])
            made.step()
            assert param.item() == 6.0
            state = {name: value.item() for name, value in made.state[param].items()}
            assert state == {"step": 1.0, "total": 8.0, "first": -3.0, "second": 1.0}

    def test_an_absent_buffer_may_be_left_out(self) -> None:
        def update(param, grad, c, average, averaged):
            if averaged:
                average = average + grad
                return dict(step=-average, average=average)
            return dict(step=-grad)

        mine = make(update=update, averaged=static(default=False), average=buffer(when="averaged"))
        assert both(mine) == -1.0

    def test_a_buffer_that_follows_the_new_parameter(self) -> None:
        def update(param, grad, c, last):
            return dict(param=0.5 * param, step=grad, last=lambda new: new + last)

        mine = make(update=update, last=buffer(init=10.0))
        for lowering in ("multi_tensor", "inductor", "eager"):
            param = torch.nn.Parameter(torch.tensor([2.0]))
            made = mine([param], lowering=lowering)
            param.grad = torch.tensor([-3.0])
            made.step()
            assert (param.item(), made.state[param]["last"].item()) == (4.0, 14.0)

    @pytest.mark.parametrize("cautious", [False, True])
    @pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
    def test_a_parameter_that_changes_after_its_step(self, lowering: str, cautious: bool) -> None:
        """Also where the step is left out; what follows the new parameter follows what it is in the end."""

        def update(param, grad, c, last):
            return dict(step=grad, after=lambda moved: floor(moved / 2), last=lambda new: new + last)

        param = torch.nn.Parameter(torch.tensor([2.0, -8.0]))
        made = make(update=update, last=buffer(init=10.0))([param], lowering=lowering, cautious=cautious)
        param.grad = torch.tensor([-3.0, 0.0])
        made.step()
        assert param.tolist() == [4.0 if cautious else 2.0, -4.0]  # half of the elements move, twice as far
        assert made.state[param]["last"].tolist() == [14.0 if cautious else 12.0, 6.0]

    def test_a_required_hyperparameter(self) -> None:
        mine = make(lr=hyper(ge=0))
        with pytest.raises(TypeError, match=r"Mine\(\) missing a required argument: 'lr'"):
            mine([torch.nn.Parameter(torch.ones(1))])
        param = torch.nn.Parameter(torch.ones(1))
        made = mine([param], 0.5)
        made.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        assert made.hyperparameters() == [{"lr": 0.5}, {"lr": 0.5}]


def mistakes() -> dict[str, tuple[dict[str, Any], str]]:
    """Bodies of classes, and what is said of each."""

    def returns_a_tuple(param, grad, c):
        return param, grad

    def method(param, grad, c):
        return dict(step=grad.sign())

    def torch_function(param, grad, c):
        return dict(step=torch.sign(grad))

    def torch_abs(param, grad, c):
        return dict(step=torch.abs(grad))

    def python_math(param, grad, c):
        return dict(step=math.sqrt(grad))

    def branch(param, grad, c):
        return dict(step=grad if grad > 0 else param)

    def unknown_coefficient(param, grad, c):
        return dict(step=c.momentum * grad)

    def unknown_argument(param, grad, c, momentum):
        return dict(step=param)

    def unknown_name(param, grad, c):
        return dict(step=sgn(grad))  # noqa: F821

    def codes_of_its_own(param, grad, c, average, average_int8):
        return dict(average=grad, average_int8=grad, step=grad)

    def forgotten_buffer(param, grad, c, average):
        return dict(step=average)

    def unknown_buffer(param, grad, c):
        return dict(step=param, average=grad)

    def forgotten_step(param, grad, c):
        return dict(param=param - c.lr * grad)

    def follower(param, grad, c, average):
        return dict(step=grad, average=lambda new: new.exp())

    def value_after(param, grad, c):
        return dict(step=grad, after=param)

    def constant(param, grad, c):
        return dict(step=param + torch.ones(1))

    def absent(param, grad, c, average):
        return dict(step=grad + average, average=average)

    def no_word(param, grad, c):
        return dict(step=param.tanh())

    def norm(param, grad, c):
        return dict(step=grad / grad.norm())

    def only_with_choice(param, grad, c, choice):
        return dict(step=torch.sign(grad) if choice else grad)

    def matrix_product(param, grad, c):
        return dict(step=grad @ param)

    def plain_numbers(param, grad, c):
        return dict(step=grad * sqrt(2.0))

    def averaged(param, grad, c, average):
        return dict(step=average, average=grad)

    def coefficients_tuple(lr):
        return (lr,)

    def forgotten_scalar(lr, total):
        return dict(lr=lr)

    def unknown_hyper(lr, beta):
        return dict(lr=lr)

    average = {"average": buffer()}

    def starting(init):
        return {"update": averaged, "average": buffer(init=init)}

    def reducing(result):
        return {"reduce": staticmethod(lambda grad, c: {"n": result(grad)})}

    def is_long(of):
        return {"is_long": fact(of=of)}

    return {
        "tuple": ({"update": returns_a_tuple}, r"Mine\.update must return a dict of values by name, got tuple"),
        "method": ({"update": method}, r"Mine\.update uses \.sign of a value; the vocabulary has sign"),
        "torch function": ({"update": torch_function}, r"Mine\.update calls torch's sign; the vocabulary has sign"),
        "another name": ({"update": torch_abs}, r"Mine\.update calls torch's abs; the vocabulary has absolute"),
        "math": (
            {"update": python_math},
            r"Mine\.update makes a Python number of a value; the vocabulary has absolute, bias_correction, exp, floor, log",
        ),
        "branch": ({"update": branch}, r"Mine\.update cannot branch on a value; use where\(\), or a static field"),
        "coefficient": (
            {"update": unknown_coefficient},
            r"Mine\.update reads c\.momentum",
        ),
        "argument": ({"update": unknown_argument}, r"Mine\.update takes \['momentum'\], which the class does not declare"),
        "name": ({"update": unknown_name}, r"Mine\.update uses sgn, which is not defined above the class"),
        "buffer": ({"update": forgotten_buffer, **average}, r"Mine\.update does not return average"),
        "extra": ({"update": unknown_buffer}, r"Mine\.update returns \['average'\], which the class does not declare"),
        "follower": ({"update": follower, **average}, r"Mine\.update uses \.exp of a value; the vocabulary has exp"),
        "after": ({"update": value_after}, r"Mine\.update returns an after that is no function"),
        "step": ({"update": forgotten_step}, r"Mine\.update does not return step"),
        "constant": ({"update": constant}, r"Mine\.update (computes with tensor|calls torch's add)"),
        "absent": (
            {"update": absent, "average": buffer(when="on"), "on": static(default=True)},
            r"Mine\.update computes with None, which stands for a buffer that is absent",
        ),
        "no word": (
            {"update": no_word},
            r"Mine\.update uses \.tanh of a value; the vocabulary has absolute, bias_correction, exp, floor, log, maximum, ",
        ),
        "reduction": ({"update": norm}, r"Mine\.update uses \.norm of a value; return mean\(\.\.\.\) or total"),
        "when": (
            {**average, "average": buffer(when="nesterof"), "nesterov": static(default=False)},
            r"Mine\.average: when='nesterof' must be one of nesterov, lr; did you mean nesterov\?",
        ),
        "matrices": (
            {"update": matrix_product},
            r'Mine\.update multiplies matrices with @; say granularity="matrix" in the',
        ),
        "numbers": ({"update": plain_numbers}, r"Mine\.update calls sqrt of Python numbers; compute it with Python's own"),
        "no coefficients": (
            {"coefficients": None},
            r"Mine has an update without coefficients; write coefficients, which returns the numbers that update finds in c",
        ),
        "no reduction": (
            reducing(lambda grad: grad),
            r"Mine\.reduce returns no mean or total for n; write n=mean\(\.\.\.\)",
        ),
        "plain number": (reducing(lambda grad: 3), r"Mine\.reduce returns no mean or total for n"),
        "over": (
            reducing(lambda grad: total(grad, over="row")),
            r"Mine\.reduce has a total over 'row'; it must be 'all' or",
        ),
        "size": (
            is_long(lambda shape: shape.numel()),
            r"Mine\.is_long is a condition, but its function returns 1 for the shape \(\); coefficients may take numel",
        ),
        "size of a matrix": (
            is_long(lambda shape: shape[1] * 2),
            r"Mine\.is_long is a condition, but its function returns 10 for the shape \(4, 5\)",
        ),
        "init": ({"average": buffer(init="lrr")}, r"Mine\.average: init='lrr' must be one of lr"),
        "init of no kind": (starting([0.0]), r"Mine\.average: init must be a number or a name, or a function, got \[0\.0\]"),
        "init of an unknown": (
            starting(lambda grads: grads),
            r"Mine\.average\.init takes \['grads'\], .* did you mean grad\?",
        ),
        "init of a buffer": (starting(lambda average: average), r"Mine\.average\.init takes \['average'\], which"),
        "init in torch": (
            starting(lambda grad: grad.exp()),
            r"Mine\.average\.init uses \.exp of a value; the vocabulary has exp",
        ),
        "init of a tuple": (starting(lambda grad: (grad, grad)), r"Mine\.average\.init computes with \(.*; a constant is a"),
        "init of a coefficient": (
            starting(lambda grad, c: c.beta * grad),
            r"Mine\.average\.init reads c\.beta, which coeff",
        ),
        "function for a scalar": (
            {"total": scalar(init=lambda param: param)},
            r"Mine\.total: init must be a number or a name, got <function",
        ),
        "init with accumulation": (
            {**starting(lambda grad: grad), "accumulation": Accumulation(kept=("beta1",))},
            r"Mine\.average: a function as init does not go with accumulation",
        ),
        "init of a scalar": ({"total": scalar(init="lrr")}, r"Mine\.total: init='lrr' must be one of lr"),
        "int8": ({"average": buffer(int8="sined")}, r"Mine\.average: int8='sined' must be one of signed, unsigned; did you"),
        "name of codes": (
            {"update": codes_of_its_own, "average": buffer(int8="signed"), "average_int8": buffer()},
            r"Mine\.average_int8 is a name that the package itself uses in the state",
        ),
        "hyper's choice": ({"far": hyper(default=0.1, when="nesterov")}, r"Mine\.far: when='nesterov' names nothing"),
        "like": ({"far": hyper(default=None, like="lrr")}, r"Mine\.far: like='lrr' must be one of lr"),
        "choice": ({"update": only_with_choice, "choice": static(default=False)}, r"Mine\.update calls torch's sign"),
        "coefficients": ({"coefficients": coefficients_tuple}, r"Mine\.coefficients must return a dict"),
        "scalar": ({"coefficients": forgotten_scalar, "total": scalar()}, r"Mine\.coefficients does not return total"),
        "hyper": ({"coefficients": unknown_hyper}, r"Mine\.coefficients takes \['beta'\], which the class does not declare"),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_mistake_is_answered_at_the_class_statement(mistake: str) -> None:
    body, answer = mistakes()[mistake]
    with pytest.raises(TypeError, match=answer):
        make(**body)


@pytest.mark.parametrize("granularity", ["tensor", "matrix"])
class TestStacks:
    def test_the_update_is_run_too(self, granularity: str) -> None:
        def update(param, grad, c):
            return dict(step=c.beta * grad)

        with pytest.raises(TypeError, match=r"Mine\.update reads c\.beta"):
            self._make(granularity, update)

    def test_a_shape_that_changes(self, granularity: str) -> None:
        def update(param, grad, c):
            return dict(step=param[None])

        with pytest.raises(TypeError, match=r"Mine\.update returns a param of shape"):
            self._make(granularity, update)

    def _make(self, granularity: str, update: Any) -> None:
        class Mine(co.CompiledOptimizer, granularity=granularity):  # type: ignore[call-arg]
            lr: float = hyper(default=0.1)

            @staticmethod
            def coefficients(lr):
                return dict(lr=lr)

        type("Mine", (Mine,), {"update": staticmethod(update)})


@pytest.mark.parametrize("optimizer", registry(), ids=lambda c: c.__name__)
def test_flags_are_torchs(optimizer: type[co.CompiledOptimizer]) -> None:
    """A group has the flags that torch.optim's has, Adam's where torch.optim lacks it; and takes whether to maximize."""
    theirs = getattr(torch.optim, optimizer.__name__, torch.optim.Adam)
    param = torch.nn.Parameter(torch.ones(2, 2))
    (group,) = optimizer([param], lr=0.1).param_groups
    flags = {"maximize", "foreach", "capturable", "differentiable", "fused"}
    expected = set(theirs([param], lr=0.1).param_groups[0]) & flags
    assert set(group) & flags == expected
    assert optimizer([param], lr=0.1, maximize=True).param_groups[0]["maximize"] is True


def test_a_function_with_two_asterisks_gets_everything() -> None:
    class Momentum(co.CompiledOptimizer):
        lr: float = hyper(default=0.1)
        average: torch.Tensor = buffer()

        @staticmethod
        def coefficients(lr, **others):
            return dict(lr=lr, count=others["step"])

        @staticmethod
        def update(param, grad, c, **state):
            average = state["average"] * 0.5 + grad
            return dict(step=c.lr * c.count * average, average=average)

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = Momentum([param])
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((2,), -(0.1 * 1 + 0.2 * 1.5)))


def test_words_of_matrices_are_not_for_elements() -> None:
    with pytest.raises(TypeError, match=r"Elementwise\.update uses identity, which is for matrices"):

        class Elementwise(co.CompiledOptimizer):
            lr: float = hyper(default=0.1)

            @staticmethod
            def coefficients(lr):
                return dict(lr=lr)

            @staticmethod
            def update(param, grad, c):
                return dict(step=c.lr * identity(grad))
