"""list, lowering, explain and doctor: what they find, and how it looks in 80 columns."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from terminal import in_ascii

import compiled_optim as co
from compiled_optim.cli import main


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints as JSON, and its exit status."""

    def run(*arguments: str) -> tuple[int, Any]:
        status = main([*arguments, "--json"])
        printed = capsys.readouterr()
        assert printed.err == ""
        return status, json.loads(printed.out)

    return run


@pytest.fixture
def drawn(capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints, in lines of at most 80 characters, and its exit status."""

    def run(*arguments: str) -> tuple[int, str]:
        status = main([*arguments])
        printed = capsys.readouterr()
        assert printed.err == ""
        lines = [line.rstrip() for line in printed.out.splitlines()]
        assert max(map(len, lines)) <= 80
        return status, "\n".join(lines)

    return run


class TestList:
    def test_a_narrow_window_has_room_for_what_they_are(self, monkeypatch: pytest.MonkeyPatch, drawn: Any) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        _, listed = drawn("list", "*adamw*")
        assert " adamw 16.0 6.1 Adam with decoupled" in " ".join(listed.split())

    def test_records(self, told: Any) -> None:
        status, records = told("list")
        assert status == 0
        assert [r["name"] for r in records] == co.list_optimizers()
        [adamw] = [r for r in records if r["name"] == "adamw"]
        signature = inspect.signature(co.AdamW).parameters
        assert {a["name"] for a in adamw["arguments"]} == signature.keys() - {"params"}
        assert {a["name"]: a["default"] for a in adamw["arguments"]}["lr"] == signature["lr"].default
        assert adamw["bytes_per_parameter"]["float32"] == 16
        assert adamw["cls"] == "AdamW"

    def test_a_part_of_a_name(self, told: Any) -> None:
        assert [r["name"] for r in told("list", "sgd")[1]] == ["sgd"]
        assert [r["name"] for r in told("list", "free")[1]] == ["adamw_schedule_free"]
        assert [r["name"] for r in told("list", "AdamWScheduleFree")[1]] == ["adamw_schedule_free"]

    def test_table(self, drawn: Any) -> None:
        assert_expected_inline(
            in_ascii(drawn("list", "*muon*")[1]),
            """\

 optimizer   works on  float32  bfloat16  least
 ------------------------------------------------------------------------------
 muon        matrix       12.0       6.0    5.1  Momentum, orthogonalized by a~
 muon_adamw  matrix       12.0       6.0    5.1  Muon for the matrices of hidd~
 nor_muon    matrix       12.0       6.0    5.1  Muon whose rows have equal sh~

Bytes for each parameter: weight, gradient and state. Least: with the best of
weights= and state_dtype=.""",
        )

    def test_one(self, drawn: Any) -> None:
        text = drawn("list", "lion")[1]
        assert text.startswith("Lion  the sign of a momentum")
        assert "betas           (0.9, 0.99)" in text or "(0.9, 0.99)" in text
        assert "``" not in text
        assert "bfloat16" in text


class TestLowering:
    def test_on_a_gpu_that_is_not_there(self, told: Any) -> None:
        pytest.importorskip("triton")
        status, records = told("lowering", "adamw", "--shapes", "4096*3,64x64")
        assert status == 0
        assert records["launches"] == 2
        assert records["operators"] == 0
        assert records["bytes_per_parameter"] == 28
        assert records["parameters"] == 4 * 4096
        assert [k["name"] for k in records["kernels"]] == ["evaluate", "update"]
        assert all(0 < k["resources"]["registers"] < 256 and not k["resources"]["spills"] for k in records["kernels"])
        assert [source.partition("(")[0] for source in records["sources"]] == ["def evaluate", "def update"]

    def test_half_the_bytes(self, told: Any) -> None:
        pytest.importorskip("triton")
        options = ["--dtype", "bfloat16", "--set", "momentum=0.9", "--arch", "sm_80"]
        records = told("lowering", "sgd", "--shapes", "8192", *options)[1]
        assert records["bytes_per_parameter"] == 10  # weight and momentum read and written, the gradient read

    def test_on_the_cpu(self, told: Any, drawn: Any, capsys: pytest.CaptureFixture[str]) -> None:
        _, records = told("lowering", "adamw", "--shapes", "64*3", "--arch", "cpu")
        assert (records["launches"], records["operators"], records["bytes_per_parameter"]) == (1, 0, None)
        [source] = records["sources"]
        assert "OURS void step(" in source
        assert "C++ kernels: 1" in drawn("lowering", "adamw", "--shapes", "64*3", "--arch", "cpu")[1]
        assert main(["lowering", "adamw", "--shapes", "64*3", "--arch", "cpu", "--source"]) == 0
        assert capsys.readouterr().out.strip() == source.strip()


MODEL = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(10, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.head = torch.nn.Linear(width, 10)

def make(width=16):
    return Tiny(width)

def matrices():
    return torch.nn.Sequential(torch.nn.Embedding(10, 16), torch.nn.Linear(16, 16, bias=False))

def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model

def loud():
    print("loud")
    return torch.nn.Linear(2, 2)

def leaves():
    raise SystemExit("no data")

model = Tiny()
number = 3

def broken():
    raise RuntimeError("no data here")
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"tiny_model_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


class TestExplain:
    def test_routing(self, tiny: str, told: Any) -> None:
        status, records = told("explain", f"{tiny}:make(width=32)")
        assert status == 0
        rules = {r["name"]: r["rule"] for r in records["parameters"]}
        assert {n for n, rule in rules.items() if rule == "Muon"} == {f"layers.{i}.weight" for i in range(3)}
        assert {*rules.values()} == {"Muon", "AdamW"}
        assert records["elements"] == 10 * 32 + 3 * (32 * 32 + 32) + 32 * 10 + 10
        assert records["bytes"]["parameters"] == 4 * records["elements"]
        assert records["bytes"]["state"]["momentum_buffer"] == 3 * 32 * 32 * 4
        assert records["step"] is None

    def test_frozen(self, tiny: str, told: Any, drawn: Any) -> None:
        _, records = told("explain", f"{tiny}:frozen", "--optimizer", "adamw")
        assert records["bytes"]["gradients"] == sum(r["gradient_bytes"] for r in records["parameters"]) == 4 * 72
        assert [r["frozen"] for r in records["parameters"]] == [True, True, False, False]
        assert "frozen        2       72  50.0%" in drawn("explain", f"{tiny}:frozen", "--optimizer", "adamw")[1]

    def test_a_module_by_name(self, tiny: str, told: Any) -> None:
        _, records = told("explain", f"{tiny}:model", "--optimizer", "adamw", "--set", "lr=0.5", "--dtype", "bfloat16")
        assert {(r["rule"], r["lr"], r["dtype"]) for r in records["parameters"]} == {("AdamW", 0.5, "bfloat16")}

    def test_warnings_are_findings(self, tiny: str, told: Any, drawn: Any) -> None:
        status, records = told("explain", f"{tiny}:matrices", "--optimizer", "muon")
        assert status == 1
        assert [(finding["name"], finding["params"]) for finding in records["findings"]] == [("embedding", ["0.weight"])]
        status, text = drawn("explain", f"{tiny}:matrices", "--optimizer", "muon")
        assert status == 1
        assert "! (embedding): 0.weight: Muon orthogonalizes an embedding" in text

    def test_what_it_cannot_make(self, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", f"{tiny}:broken"]) == 2
        said = f"compiled-optim explain: {tiny}:broken: RuntimeError: no data here; try --device cpu\n"
        assert capsys.readouterr().err == said
        assert main(["explain", f"{tiny}:number"]) == 2
        assert capsys.readouterr().err == f"compiled-optim explain: {tiny}:number is a int, not a torch.nn.Module\n"

    def test_what_the_users_code_does(self, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", f"{tiny}:loud", "--optimizer", "adamw", "--json"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["elements"] == 6
        assert printed.err == "loud\n"
        assert main(["explain", f"{tiny}:leaves"]) == 2
        assert "SystemExit: no data" in capsys.readouterr().err
        assert main(["explain", f"{tiny}:make({'1' * 300!r})"]) == 2
        assert "TypeError" in capsys.readouterr().err

    def test_launches(self, tiny: str, told: Any) -> None:
        pytest.importorskip("triton")
        for options in ([], ["--dtype", "bfloat16", "--set", "weights=split8"]):
            _, records = told("explain", f"{tiny}:make", "--optimizer", "adamw", "--arch", "sm_90", *options)
            assert records["step"] == {"arch": "sm_90", "launches": 2, "operators": 0}

    def test_picture(self, tiny: str, drawn: Any) -> None:
        assert_expected_inline(
            in_ascii(drawn("explain", f"{tiny}:make")[1]),
            """\
MuonAdamW: 1.15 k parameters in 9 tensors, 15.3 kB, 13.38 bytes for each
weights 4.58 kB  gradients 4.58 kB  step 72 B  momentum_buffer 3.07 kB  exp_avg
1.51 kB  exp_avg_sq 1.51 kB

 rule   tensors  numbers  share      lr  decay  precision
 ---------------------------------------------------------------------
 Muon         3      768  67.0%  0.0008    0.1  float32, state float32
 AdamW        6      378  33.0%   0.001    0.1  float32, state float32


 parameter             shape    rule   why
 ----------------------------------------------------------------------
 embed.weight          10 x 16  AdamW  matches '*embed*'
 layers.*.weight  3 x  16 x 16  Muon   a matrix that no pattern matches
 layers.*.bias    3 x  16       AdamW  matches '*bias*'
 head.weight           10 x 16  AdamW  matches 'head.*'
 head.bias             10       AdamW  matches 'head.*'

no warnings""",
        )


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _writable_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def test_records(self, told: Any) -> None:
        status, records = told("doctor")
        found = {r["what"]: r for r in records}
        assert status == 0, records
        assert found["torch"]["detail"] == torch.__version__
        assert found["adamw on cpu"]["status"] == found["muon on cpu"]["status"] == found["compiled C++"]["status"] == "ok"
        assert {"compiled_optim", "C++ compiler", "Triton", "GPU", "Triton's cache", "rich"} <= found.keys()

    def test_drawn(self, drawn: Any) -> None:
        assert drawn("doctor")[1].endswith("nothing falls back")

    def test_what_falls_back(self, told: Any, drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from compiled_optim.lowering import coefficients
        from compiled_optim.memory import cache

        monkeypatch.setattr(coefficients, "_kernels", {})
        monkeypatch.setattr(cache, "compiler", lambda: ())
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        status, records = told("doctor")
        found = {r["what"]: r for r in records}
        assert status == 1
        assert found["C++ compiler"]["status"] == found["adamw on cpu"]["status"] == "falls back"
        assert found["C++ compiler"]["advice"] == "install g++ or clang++, or name one in CXX"
        assert "no C++ compiler was found; install g++" in found["adamw on cpu"]["detail"]
