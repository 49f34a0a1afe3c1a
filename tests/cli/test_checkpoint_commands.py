"""inspect and diff of checkpoints: files as training leaves them, with what went wrong in some."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from terminal import in_ascii
from torch.distributed.checkpoint import FileSystemReader

import compiled_optim as co
from compiled_optim.cli import main
from compiled_optim.interop import convert


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _trained(steps: int = 3, lr: float = 1e-3, kind: Any = co.AdamW) -> Any:
    """An optimizer of four parameters: of one the gradient is 0, and another never has one."""
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "dead": (2,), "still": (3,)}
    params = {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}
    optimizer = kind(params.items(), lr=lr)
    for step in range(1, steps + 1):
        params["a.weight"].grad = torch.full((4, 3), float(step))
        params["a.bias"].grad = torch.full((4,), -float(step))
        params["dead"].grad = torch.zeros(2)
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(_trained().state_dict(), "a.pt")
    return Path("a.pt")


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main([*arguments, "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, json.loads(printed.out)


def _drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments])
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


class TestInspect:
    def test_records(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, records = _told(capsys, "inspect", "a.pt")
        found = {r["name"]: r for r in records["parameters"]}
        assert status == 1
        assert [*found] == ["a.weight", "a.bias", "dead", "still"]
        assert {name: r["step"] for name, r in found.items()} == {"a.weight": 3, "a.bias": 3, "dead": 3, "still": 0}
        average = torch.load("a.pt")["state"][0]["exp_avg"]
        known = found["a.weight"]["state"]["exp_avg"]
        assert known["dtype"] == "float32"
        assert known["shape"] == [4, 3]
        assert known["min"] == average.min().item()
        assert known["mean_abs"] == average.abs().mean().item()
        assert known["non_finite"] == 0
        assert records["groups"][0]["lr"] == 1e-3
        assert records["findings"] == {
            "dead: took steps, but their averages are all 0": ["dead"],
            "never stepped, though others were": ["still"],
        }

    def test_what_is_not_finite(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        content["state"][1]["exp_avg"][2] = float("nan")
        torch.save(content, "a.pt")
        status, records = _told(capsys, "inspect", "a.pt", "--names", "a.*")
        assert status == 1
        assert records["findings"] == {"not finite: their state has an infinite or NaN number": ["a.bias"]}
        assert records["parameters"][1]["state"]["exp_avg"]["non_finite"] == 1

    def test_all_is_well(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _told(capsys, "inspect", "a.pt", "--names", "a.*")[0] == 0
        assert "nothing is wrong" in _drawn(capsys, "inspect", "a.pt", "--names", "a.*")

    def test_picture(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert_expected_inline(
            in_ascii(_drawn(capsys, "inspect", "a.pt")),
            """\
a.pt: 4 parameters in 1 group, step 0 to 3, 168 B of state

 group                             #0
 ------------------------------------
 lr                             0.001
 betas                   (0.9, 0.999)
 eps                            1e-08
 weight_decay                    0.01
 decoupled_weight_decay          True


 name      shape  step  state       dtype      min      max  mean |x|
 --------------------------------------------------------------------
 a.weight  4 x 3     3  exp_avg     f32     5.6e-1   5.6e-1    5.6e-1
                        exp_avg_sq  f32     1.4e-2   1.4e-2    1.4e-2
 a.bias    4         3  exp_avg     f32    -5.6e-1  -5.6e-1    5.6e-1
                        exp_avg_sq  f32     1.4e-2   1.4e-2    1.4e-2
 dead      2         3  exp_avg     f32          0        0         0
                        exp_avg_sq  f32          0        0         0
 still     3         0  exp_avg     f32          0        0         0
                        exp_avg_sq  f32          0        0         0

! dead: took steps, but their averages are all 0: dead
! never stepped, though others were: still""",
        )

    @pytest.mark.parametrize("name", ["NAdam", "Adamax", "Rprop", "SGD", "Muon", "AdamWScheduleFree", "Prodigy", "Ranger"])
    @pytest.mark.parametrize("library", [co, torch.optim])
    def test_dead_and_still(self, library: Any, name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        if not hasattr(library, name):
            pytest.skip("torch has no such optimizer")
        params = {name: torch.ones(4, 4, requires_grad=True) for name in ("live", "dead", "still")}
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(library, name)(params.items(), lr=1e-3, **options)
        for _ in range(2):
            params["live"].grad, params["dead"].grad = torch.ones(4, 4), torch.zeros(4, 4)
            optimizer.step()
        torch.save(optimizer.state_dict(), "b.pt")
        assert [*_told(capsys, "inspect", "b.pt")[1]["findings"].values()] == [["dead"], ["still"]]
        assert _told(capsys, "inspect", "b.pt", "--names", "still")[0] == 1

    @pytest.mark.parametrize("name", ["ASGD", "SGD"])
    def test_what_cannot_be_seen(self, name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save(_trained(kind=getattr(co, name)).state_dict(), "b.pt")
        records = _told(capsys, "inspect", "b.pt")[1]
        assert records["without_averages"] == ["a.weight", "a.bias", "dead"]
        drawn = _drawn(capsys, "inspect", "b.pt", "--names", "dead")
        assert drawn.endswith("gradients of 0 cannot be seen, as state has no averages: dead")
        assert _told(capsys, "inspect", "a.pt")[1]["without_averages"] == []

    def test_thousands_of_parameters(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """As lines of text: rich would take many seconds."""
        content = torch.load("a.pt")
        [group] = content["param_groups"]
        group["params"], group["param_names"] = [*range(1500)], [f"layers.{i}.[weight]" for i in range(1500)]
        content["state"] = dict.fromkeys(range(1500), content["state"][0])
        torch.save(content, "b.pt")
        assert main(["inspect", "b.pt"]) == 0
        lines = capsys.readouterr().out.splitlines()
        at = lines.index("layers.0.[weight]     4 x 3     3  exp_avg     f32    5.6e-1  5.6e-1    5.6e-1")
        assert lines[at - 1] == "name                  shape  step  state       dtype     min     max  mean |x|"
        assert lines[at + 2999] == "                                   exp_avg_sq  f32    1.4e-2  1.4e-2    1.4e-2"
        assert lines[-1] == "nothing is wrong in it"

    def test_double_precision(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        for i, number in enumerate((1e300, -1e300, 1e-50)):
            content["state"][i]["exp_avg"] = torch.full_like(content["state"][i]["exp_avg"], number, dtype=torch.float64)
        torch.save(content, "b.pt")
        assert [*_told(capsys, "inspect", "b.pt")[1]["findings"].values()] == [["still"]]

    def test_many_groups(self, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        [group] = content["param_groups"]
        content["param_groups"] += [
            {**group, "params": [], "param_names": [], "lr": 0.00100001 + i, "betas": (0.9, 0.99999)} for i in range(12)
        ]
        torch.save(content, "b.pt")
        monkeypatch.setenv("COLUMNS", "60")
        main(["inspect", "b.pt"])
        printed = capsys.readouterr().out
        assert all(number in printed for number in ("11.001", "0.00100001", "(0.9, 0.99999)", "exp_avg_sq", " 1.4e-2"))
        assert "\n a.weight " in printed

    @pytest.mark.full
    def test_a_pipe(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COLUMNS")
        content = torch.load("a.pt")
        content["param_groups"][0]["param_names"][0] = "long.name." * 15
        torch.save(content, "b.pt")
        command = [sys.executable, "-m", "compiled_optim", "inspect", "b.pt"]
        environment = os.environ | {"PYTHONPATH": str(Path(co.__file__).parents[1])}
        assert (
            "long.name." * 15 in subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        )
        reads, writes = os.pipe()
        os.close(reads)
        closed = subprocess.run(command, env=environment, stdout=writes, stderr=subprocess.PIPE, check=False)
        os.close(writes)
        assert (closed.returncode, closed.stderr) == (0, b"")

    def test_in_a_dict_of_several_things(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        state = torch.load("a.pt")
        for key, options in (("optimizer", []), ("optimizer_state_dict", []), ("other", ["--key", "other"])):
            torch.save({"epoch": 3, key: state}, "b.pt")
            assert len(_told(capsys, "inspect", "b.pt", *options)[1]["parameters"]) == 4
        assert main(["inspect", "b.pt"]) == 2
        said = (
            "compiled-optim inspect: b.pt: not an optimizer state dict: it must be a dict with 'state' and 'param_groups'; "
            "it holds 'epoch', 'other': choose by key (--key)\n"
        )
        assert capsys.readouterr().err == said
        assert main(["inspect", "b.pt", "--key", "wrong"]) == 2
        assert "b.pt has no entry 'wrong'; it holds 'epoch', 'other'" in capsys.readouterr().err

    def test_a_damaged_entry_is_what_the_message_is_about(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save({"epoch": 3, "optimizer": {**torch.load("a.pt"), "format_version": 99}}, "b.pt")
        assert main(["inspect", "b.pt"]) == 2
        assert "b.pt, under 'optimizer': the checkpoint has format_version 99" in capsys.readouterr().err

    def test_the_file_is_loaded_once(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.save({"epoch": 3, "optimizer_state_dict": torch.load("a.pt")}, "b.pt")
        loads, load = [], torch.load
        monkeypatch.setattr(torch, "load", lambda *args, **options: loads.append(args) or load(*args, **options))
        main(["inspect", "b.pt"])
        assert len(loads) == 1

    def test_safetensors(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        convert.convert("a.pt", "a.safetensors", "safetensors")
        of_torch, of_safetensors = (_told(capsys, "inspect", name)[1] for name in ("a.pt", "a.safetensors"))
        assert of_safetensors["parameters"] == of_torch["parameters"]

    def test_torch_optim_without_names(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        param = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        param.grad = torch.ones(2)
        optimizer.step()
        torch.save(optimizer.state_dict(), "b.pt")
        status, records = _told(capsys, "inspect", "b.pt")
        assert status == 0
        assert [r["name"] for r in records["parameters"]] == ["0"]

    def test_what_is_hostile_or_damaged(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save({"state": print, "param_groups": []}, "hostile.pt")
        Path("damaged.pt").write_bytes(saved.read_bytes()[:500])
        for name in ("hostile.pt", "damaged.pt"):
            assert main(["inspect", name]) == 2
            printed = capsys.readouterr()
            assert printed.err.startswith(f"compiled-optim inspect: {name} is damaged, or holds objects other than")
            assert printed.err.count("\n") == 1
            assert printed.out == ""

    @pytest.mark.parametrize("form", ["optimi", "bitsandbytes", "fused"])
    def test_the_forms_of_other_packages(self, form: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = _trained().state_dict()
        content["state"][3]["step"] += 3  # which the form of a fused optimizer counts by group
        torch.save(content, "b.pt")
        convert.convert("b.pt", "c.pt", form)
        wanted, read = (_told(capsys, "inspect", name)[1] for name in ("b.pt", "c.pt"))
        parts = [[(r["shape"], r["step"], r["state"].keys()) for r in each["parameters"]] for each in (wanted, read)]
        assert parts[0] == parts[1]
        assert read["findings"]

    def test_adafactor_does_not_tell_shapes(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save(_trained(kind=co.Adafactor).state_dict(), "b.pt")
        assert [r["shape"] for r in _told(capsys, "inspect", "b.pt")[1]["parameters"]] == [None, [4], [2], [3]]
        assert "a.weight" in _drawn(capsys, "inspect", "b.pt")


class TestDiff:
    def test_equal(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _told(capsys, "diff", "a.pt", "a.pt") == (
            0,
            {"groups": {}, "only_a": [], "only_b": [], "state": [], "left_out": []},
        )
        assert _drawn(capsys, "diff", "a.pt", "a.pt") == "equal groups, names and state"

    @pytest.mark.parametrize("without", ["", "optimizer.order"])
    def test_a_folder_is_equal_to_what_it_was_converted_from(
        self, without: str, saved: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Also one whose writer did not note the order of parameters, such as torchtitan."""
        convert.convert(saved, Path("folder"), "dcp")
        metadata = FileSystemReader("folder").read_metadata()
        for of_entries in (metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data):
            for key in [key for key in of_entries or {} if without and getattr(key, "fqn", key) == without]:
                del of_entries[key]
        Path("folder/.metadata").write_bytes(pickle.dumps(metadata))
        assert _told(capsys, "diff", "a.pt", "folder")[0] == 0

    def test_differences(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = _trained(lr=5e-4).state_dict()
        other["state"][0]["exp_avg"][0, 0] += 0.5
        other["state"][1]["exp_avg_sq"] = other["state"][1]["exp_avg_sq"].half()
        other["state"][2]["step"] += 1
        other["param_groups"][0]["param_names"][3] = "moved"
        torch.save(other, "b.pt")
        status, records = _told(capsys, "diff", "a.pt", "b.pt")
        assert status == 1
        assert records["groups"] == {"param_groups[0]['lr']": ["0.001", "0.0005"]}
        assert (records["only_a"], records["only_b"]) == (["still"], ["moved"])
        first, second, third = records["state"]
        assert first == {"name": "a.weight", "state": "exp_avg", "what": "numbers", "max": 0.5}
        assert (second["state"], second["what"]) == ("exp_avg_sq", "float32 and float16")
        assert third == {"name": "dead", "state": "step", "what": "3 and 4", "max": None}
        assert_expected_inline(
            in_ascii(_drawn(capsys, "diff", "a.pt", "b.pt")),
            """\

 group                  a.pt   b.pt
 ------------------------------------
 param_groups[0]['lr']  0.001  0.0005

! only a.pt has still
! only b.pt has moved

 parameter  state       differs in           largest difference
 --------------------------------------------------------------
 a.weight   exp_avg     numbers                             0.5
 a.bias     exp_avg_sq  float32 and float16           1.691e-06
 dead       step        3 and 4
""",
        )

    @pytest.mark.parametrize(
        ("changes", "shown"),
        [
            ({"lr": 1.00001e-3}, ["0.001", "0.00100001"]),
            ({"betas": (0.9, 0.999000000001)}, None),
            ({"eps": float("nan")}, None),
        ],
    )
    def test_close_numbers(self, changes: Any, shown: Any, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = _trained().state_dict()
        other["param_groups"][0].update(changes)
        torch.save(other, "b.pt")
        status, records = _told(capsys, "diff", "a.pt", "b.pt")
        [values] = records["groups"].values()
        assert status == 1
        assert values[0] != values[1]
        assert shown in (None, values)
        assert _told(capsys, "diff", "b.pt", "b.pt")[0] == 0

    def test_groups_and_order(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        [group] = content["param_groups"]

        def split(*sizes: int) -> None:
            starts = [0, *sizes[:-1]]
            cut = [(start, start + length) for start, length in zip(starts, sizes, strict=True)]
            groups = [{**group, **{k: group[k][slice(*at)] for k in ("params", "param_names")}} for at in cut]
            torch.save(content | {"param_groups": groups}, f"{sizes[0]}.pt")

        split(1, 3)
        split(3, 1)
        status, records = _told(capsys, "diff", "1.pt", "3.pt")
        assert status == 1
        assert records["groups"] == {
            "param_groups[0]['params']": ["absent", "a.bias, at 1"],
            "param_groups[1]['params']": ["a.bias, at 0", "still, at 0"],
        }
        group["param_names"].reverse()
        torch.save(content, "b.pt")
        assert _told(capsys, "diff", "a.pt", "b.pt")[1]["groups"] == {
            "param_groups[0]['params']": ["a.weight, at 0", "still, at 0"]
        }

    def test_what_is_no_tensor_of_a_named_parameter(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        content["param_groups"][0]["param_names"][:2] = ["w", "w"]
        content["state"][0] |= {"old_dirs": [torch.zeros(2), torch.full((2,), float("nan"))], "n_iter": 3, "note": "x"}
        content["state"]["ema"] = {"a": torch.ones(3)}
        torch.save(content, "a.pt")
        assert _told(capsys, "diff", "a.pt", "a.pt")[0] == 0
        content["state"][0]["old_dirs"][0] += 1
        content["state"][0] |= {"n_iter": 4, "note": "y"}
        content["state"][1]["exp_avg"][0] += 1
        content["state"]["ema"]["a"] += 2
        torch.save(content, "b.pt")
        changed = _told(capsys, "diff", "a.pt", "b.pt")[1]["state"]
        assert [(c["name"], c["state"], c["what"], c["max"]) for c in changed] == [
            ("w", "old_dirs[0]", "numbers", 1.0),
            ("w", "n_iter", "3 and 4", None),
            ("w", "note", "x and y", None),
            ("w (2)", "exp_avg", "numbers", 1.0),
            ("state['ema']", "a", "numbers", 2.0),
        ]

    def test_what_cannot_be_read(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = torch.load("a.pt")
        content["param_groups"][0]["master_bytewidth"] = 4
        content["state"][0]["error_bits"] = torch.ones(4, 3, dtype=torch.int8)
        torch.save(content, "b.pt")
        status, records = _told(capsys, "diff", "b.pt", "b.pt")
        assert status == 1
        assert len(records["left_out"]) == 2
        assert "error_bits" in records["left_out"][0]
        assert any("left out" in found for found in _told(capsys, "inspect", "b.pt")[1]["findings"])

    def test_a_file_and_a_name(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", "a.pt", "adamw"]) == 2
        assert capsys.readouterr().err == "compiled-optim diff: [Errno 2] No such file or directory: 'adamw'\n"


def test_explain_leads_to_the_command_for_checkpoints(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a.pt"]) == 2
    assert capsys.readouterr().err.endswith("; for a checkpoint there is compiled-optim inspect\n")
