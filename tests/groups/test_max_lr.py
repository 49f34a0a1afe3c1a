"""A hyperparameter that goes with a choice: ``max_lr``, which groups have where they decouple their learning rate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from round_trips import pickled, through_a_file
from torch.nn import Parameter
from torch.optim import lr_scheduler

import compiled_optim as co


def params(count: int = 1) -> list[Parameter]:
    return [Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(count)]


def made(count: int = 1, **options: Any) -> co.AdamW:
    return co.AdamW([{"params": [param]} for param in params(count)], **{"lr": 0.1, "weight_decay": 0.5, **options})


def decayed(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a step without gradients leaves of the first number of each group, which was 1."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.fill_(1.0)
            param.grad = torch.zeros_like(param)
    optimizer.step()
    return [group["params"][0][0].item() for group in optimizer.param_groups]


def test_groups_have_torchs_keys_where_nobody_asks_for_more() -> None:
    theirs = torch.optim.AdamW(params())
    for name, optimizer in (("AdamW", made()), ("SGD", co.SGD(params())), ("Adam", co.Adam(params()))):
        theirs = getattr(torch.optim, name)(params())
        own = {*theirs.param_groups[0]} - {"capturable"}
        assert {*optimizer.param_groups[0]} - {"capturable"} == own
        assert {*optimizer.state_dict()["param_groups"][0]} - {"capturable"} == own
        assert "max_lr" not in optimizer.defaults
        assert optimizer.hyperparameters()[0].keys() <= own
        with pytest.raises(KeyError):
            optimizer.param_groups[0]["max_lr"]


def test_it_is_each_groups_own_learning_rate_when_it_was_made() -> None:
    a, b, c = params(3)
    optimizer = co.SGD([{"params": [a]}, {"params": [b], "lr": 0.02}], lr=0.1, decouple_lr=True)
    optimizer.param_groups[0]["lr"] = 0.03
    optimizer.add_param_group({"params": [c], "lr": torch.tensor(0.7, dtype=torch.float64)})
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.02, 0.7]
    assert all(optimizer.hyperparameter("max_lr", i) is not optimizer.hyperparameter("lr", i) for i in range(3))


def test_an_adopted_learning_rate_moves_on_alone() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = made(lr=lr, decouple_lr=True)
    lr.fill_(0.05)
    assert optimizer.param_groups[0]["max_lr"] == 0.1
    assert decayed(optimizer) == pytest.approx([0.75])


def test_the_choice_is_made_later() -> None:
    """What appears is the learning rate with which the group was made, also in copies that were made in between."""
    optimizer = made()
    optimizer.param_groups[0]["lr"] = 0.02
    copies = [optimizer, copy.deepcopy(optimizer), pickled(optimizer)]
    for each in copies:
        assert decayed(each) == pytest.approx([1 - 0.02 * 0.5])
        each.param_groups[0]["decouple_lr"] = True
        assert each.param_groups[0]["max_lr"] == 0.1
        assert decayed(each) == pytest.approx([1 - 0.02 / 0.1 * 0.5])
        each.param_groups[0]["decouple_lr"] = False
        assert decayed(each) == pytest.approx([1 - 0.02 * 0.5])
    optimizer.param_groups[0].update(max_lr=0.5, decouple_lr=True)
    assert decayed(optimizer) == pytest.approx([1 - 0.02 / 0.5 * 0.5])


def test_a_plain_dict_among_the_groups() -> None:
    optimizer = made(decouple_lr=True)
    optimizer.param_groups = [{"params": params(), "lr": 0.03, "decouple_lr": True}]
    assert decayed(optimizer) == pytest.approx([0.5])
    assert optimizer.param_groups[0]["max_lr"] == 0.03


class TestSchedules:
    def test_one_cycle_decays_by_its_peak(self) -> None:
        """torch's OneCycleLR writes the peak under this very name."""
        optimizer = made(2, decouple_lr=True)
        scheduler = lr_scheduler.OneCycleLR(optimizer, [0.3, 0.7], total_steps=10)
        for _ in range(9):
            rates = [float(group["lr"]) / peak for group, peak in zip(optimizer.param_groups, (0.3, 0.7), strict=True)]
            assert decayed(optimizer) == pytest.approx([1 - rate * 0.5 for rate in rates])
            scheduler.step()

    def test_one_cycle_without_the_choice(self) -> None:
        """It keeps its own entry there, also from a checkpoint on, as with torch.optim."""
        histories = []
        for kind in (co.AdamW, torch.optim.AdamW):
            optimizer = kind(params(), lr=0.1, weight_decay=0.5)
            scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
            history = []
            for step in range(9):
                if step == 4:
                    saved = optimizer.state_dict(), scheduler.state_dict()
                    optimizer = kind(params(), lr=0.1, weight_decay=0.5)
                    optimizer.load_state_dict(saved[0])
                    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10, last_epoch=3)
                    scheduler.load_state_dict(saved[1])
                history += [float(optimizer.param_groups[0]["lr"]), *decayed(optimizer)]
                scheduler.step()
            histories.append(history)
        assert histories[0] == pytest.approx(histories[1], rel=1e-15)

    def test_in_the_step(self) -> None:
        optimizer = made(2, decouple_lr=True)
        optimizer.schedule(max_lr=lambda step: 0.1 * step, group=1)
        assert decayed(optimizer) == pytest.approx([0.5, 0.5])
        assert decayed(optimizer) == pytest.approx([0.5, 0.75])
        optimizer.schedule(max_lr=None)
        assert decayed(optimizer) == pytest.approx([0.5, 0.75])
        with pytest.raises(ValueError, match=r"param_groups\[0\] has no max_lr; it needs decouple_lr=True"):
            made().schedule(max_lr=lambda step: step)


class TestCheckpoints:
    def run(self) -> dict[str, Any]:
        optimizer = made(2, decouple_lr=True)
        optimizer.param_groups[1].update(max_lr=0.4, lr=0.2)
        decayed(optimizer)
        loaded: dict[str, Any] = through_a_file(optimizer.state_dict())
        assert [(g["max_lr"], g["decouple_lr"]) for g in loaded["param_groups"]] == [(0.1, True), (0.4, True)]
        return loaded

    def test_restored(self) -> None:
        optimizer = made(2, lr=0.9, decouple_lr=True)
        live = optimizer.hyperparameter("max_lr", 1)
        optimizer.load_state_dict(self.run())
        assert optimizer.hyperparameter("max_lr", 1) is live
        assert [group["max_lr"] for group in optimizer.param_groups] == [0.1, 0.4]
        assert decayed(optimizer) == pytest.approx([0.5, 0.75])

    def test_kept(self) -> None:
        optimizer = made(2, lr=0.9, decouple_lr=True)
        optimizer.load_state_dict(self.run(), hyperparameters="keep")
        assert [group["max_lr"] for group in optimizer.param_groups] == [0.9, 0.9]

    @pytest.mark.parametrize("decay", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.1)])
    def test_another_meaning_of_decay_is_refused(self, decay: tuple[float, float]) -> None:
        """torch.optim does not say what its decay means. The choice stays, and so does ``weight_decay``."""
        saved = torch.optim.AdamW([{"params": [p]} for p in params(2)], lr=0.2, weight_decay=decay[0]).state_dict()
        optimizer = made(2, lr=0.9, weight_decay=decay[1], decouple_lr=True)
        before = optimizer.hyperparameters()
        message = r'param_groups\[0\]: decouple_lr is False in the checkpoint, .* hyperparameters="keep" keeps'
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert optimizer.hyperparameters() == before
        assert not any(optimizer.load_state_dict(saved, hyperparameters="keep"))
        report = optimizer.load_state_dict(saved, strict=False)
        assert [problem.split(",")[0] for problem in report.mismatched] == [
            f"param_groups[{i}]: decouple_lr is False in the checkpoint" for i in range(2)
        ]
        assert optimizer.hyperparameters() == [{**group, "lr": 0.2} for group in before]

    @pytest.mark.parametrize("ours", [False, True])
    def test_another_meaning_of_decay_is_taken(self, ours: bool) -> None:
        saver = made(2, lr=0.2, weight_decay=0.5, decouple_lr=not ours)
        optimizer = made(2, lr=0.9, weight_decay=0.1, decouple_lr=ours)
        report = optimizer.load_state_dict(saver.state_dict())
        assert not any(report[:3])
        assert [said.split(" as ")[0] for said in report.changed] == [
            f"param_groups[{i}]: decouple_lr is {not ours}" for i in range(2)
        ]
        assert decayed(optimizer) == decayed(saver)

    def test_without_decay_torchs_checkpoint_says_nothing(self) -> None:
        optimizer = made(2, lr=0.9, weight_decay=0.0, decouple_lr=True)
        theirs = torch.optim.AdamW([{"params": [p]} for p in params(2)], lr=0.2, weight_decay=0.0)
        assert not any(optimizer.load_state_dict(theirs.state_dict()))
        assert [(group["lr"], group["max_lr"]) for group in optimizer.param_groups] == [(0.2, 0.9)] * 2

    @pytest.mark.parametrize("ours", [False, True])
    @pytest.mark.parametrize(("kind", "name"), [(co.SGD, "decouple_wd"), (co.Adam, "decoupled_weight_decay")])
    def test_decay_apart_from_the_gradient(self, kind: Any, name: str, ours: bool) -> None:
        def make(is_decoupled: bool, weight_decay: float = 0.3) -> co.CompiledOptimizer:
            made: co.CompiledOptimizer = kind(params(), lr=0.1, weight_decay=weight_decay, **{name: is_decoupled})
            return made

        assert not any(make(ours).load_state_dict(make(ours).state_dict()))
        for decay in (0.0, 0.3):
            optimizer = make(ours, decay)
            assert not any(optimizer.load_state_dict(make(not ours, decay).state_dict())[:3])
            assert optimizer.param_groups[0][name] is not ours
        theirs = getattr(torch.optim, kind.__name__)(params(), lr=0.1, weight_decay=0.3)
        if ours and kind is co.SGD:
            with pytest.raises(ValueError, match=r"decouple_wd is False in the checkpoint, .*keep"):
                make(ours).load_state_dict(theirs.state_dict())
        else:
            assert not any(make(ours).load_state_dict(theirs.state_dict())[:3])

    @pytest.mark.parametrize("value", [[0.1, 0.2], "high", None, torch.ones(2)], ids=["list", "text", "None", "tensor"])
    def test_a_users_own_entry_of_that_name(self, value: Any) -> None:
        theirs = torch.optim.AdamW(params(), lr=0.2, weight_decay=0.5)
        theirs.param_groups[0]["max_lr"] = value
        optimizer = made()
        before = optimizer.hyperparameters()
        assert not any(optimizer.load_state_dict(theirs.state_dict()))
        group = optimizer.param_groups[0]
        again = pickled(optimizer).param_groups[0].get("max_lr")
        for held in (group["max_lr"], optimizer.state_dict()["param_groups"][0]["max_lr"], again, dict(group)["max_lr"]):
            assert str(held) == str(value)
        assert optimizer.hyperparameters() == [{**before[0], "lr": 0.2}]
        assert decayed(optimizer) == pytest.approx([0.9])
        other = made()
        assert not any(other.load_state_dict({**optimizer.state_dict(), "state": {}}))
        assert str(other.param_groups[0]["max_lr"]) == str(value)
        del group["max_lr"]
        group["decouple_lr"] = True
        assert group["max_lr"] == 0.1

    def test_for_torch(self) -> None:
        theirs = torch.optim.AdamW([{"params": [p]} for p in params(2)], lr=0.05)
        theirs.load_state_dict(self.run())
        decayed(theirs)


def _assigned(key: str, value: Any) -> None:
    optimizer = made(decouple_lr=True)
    optimizer.param_groups[0][key] = value
    optimizer.step()


NEEDED = "decouple_lr=True or corrected_weight_decay=True"
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unread": (lambda: made(max_lr=0.1), ValueError, f"nothing reads max_lr without {NEEDED}, which no group has"),
    "below 0": (lambda: made(decouple_lr=True, max_lr=-1), ValueError, "Invalid max_lr value: -1 .* must be >= 0"),
    "no number": (lambda: made(decouple_lr=True, max_lr="1"), TypeError, "the argument max_lr must be a number"),
    "assigned below 0": (lambda: _assigned("max_lr", -1.0), ValueError, r"max_lr of param_groups\[0\] must be >= 0"),
    "assigned None": (lambda: _assigned("max_lr", None), TypeError, r"max_lr of param_groups\[0\] must be a number"),
    "no bool": (lambda: _assigned("decouple_lr", 1), TypeError, r"decouple_lr of param_groups\[0\] must be a bool, got 1"),
    "neither": (lambda: co.SGD(params(), decouple_wd="no"), TypeError, "decouple_wd must be a bool or None, got 'no'"),
    "both ways": (
        lambda: co.Adam(params(), decouple_wd=False, decoupled_weight_decay=True),
        ValueError,
        "decouple_wd=False does not go with decoupled_weight_decay=True",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "remove",
    [
        lambda group: group.__delitem__("max_lr"),
        lambda group: group.pop("max_lr"),
        lambda group: group.pop("max_lr", None),
        lambda group: [group.popitem() for _ in range(20)],
    ],
    ids=["del", "pop", "pop with a default", "popitem"],
)
def test_it_stays_while_steps_read_it(remove: Callable[[Any], Any]) -> None:
    optimizer = made(decouple_lr=True)
    group = optimizer.param_groups[0]
    group["max_lr"] = 0.4
    with pytest.raises(ValueError, match=r"max_lr of param_groups\[0\] cannot be removed: decouple_lr=True reads it; set"):
        remove(group)
    assert optimizer.hyperparameters()[0]["max_lr"] == optimizer.state_dict()["param_groups"][0]["max_lr"] == 0.4


def test_it_goes_where_nothing_reads_it() -> None:
    optimizer = made(decouple_lr=True)
    group = optimizer.param_groups[0]
    group["decouple_lr"] = False
    assert group.pop("max_lr") == 0.1
    assert "max_lr" not in optimizer.hyperparameters()[0]
    assert group.pop("max_lr", None) is None
    with pytest.raises(KeyError, match="max_lr"):
        del group["max_lr"]
    assert decayed(optimizer) == pytest.approx([0.95])


def test_a_mistake_in_a_group_changes_nothing() -> None:
    optimizer = co.Adam(params(), lr=0.1, decoupled_weight_decay=True)
    with pytest.raises(ValueError, match="decouple_wd=False does not go with"):
        optimizer.param_groups[0]["decouple_wd"] = False
    with pytest.raises(ValueError, match="decouple_wd=False does not go with"):
        optimizer.add_param_group({"params": params(), "decouple_wd": False})
    assert len(optimizer.param_groups) == 1
    assert "decouple_wd" not in optimizer.param_groups[0]


def test_one_group_that_reads_it_is_enough() -> None:
    a, b = params(2)
    optimizer = co.AdamW([{"params": [a], "decouple_lr": True}, {"params": [b]}], lr=0.1, weight_decay=0.5, max_lr=0.2)
    assert decayed(optimizer) == pytest.approx([0.75, 0.95])
    assert optimizer.defaults["max_lr"] == 0.2
