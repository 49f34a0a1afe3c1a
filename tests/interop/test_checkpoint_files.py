"""A conversion of files destroys nothing, and every damage ends in a message."""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_optim.cli import main
from compiled_optim.interop import convert as files

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("torch", "compiled_optim", "named", "optimi", "safetensors")
TENSORS = {"fc.weight": (4, 3), "fc.bias": (4,), "scale": ()}


def _state(*entries: str, **options: Any) -> dict[str, Any]:
    """A state dict in torch.optim's form: two groups, three parameters with names."""
    generator = torch.Generator().manual_seed(7)
    state = {
        i: {"step": torch.tensor(3.0)} | {entry: torch.rand(shape, generator=generator) for entry in entries}
        for i, shape in enumerate(TENSORS.values())
    }
    names = list(TENSORS)
    groups = [
        {"params": [0, 1], "param_names": names[:2], "lr": 0.05, "weight_decay": 0.3, **options},
        {"params": [2], "param_names": names[2:], "lr": 0.5, "weight_decay": 0.0, **options},
    ]
    return {"state": state, "param_groups": groups}


def _adamw() -> dict[str, Any]:
    return _state("exp_avg", "exp_avg_sq", betas=(0.8, 0.95), eps=1e-3, amsgrad=False, decoupled_weight_decay=True)


def _sgd() -> dict[str, Any]:
    saved = _state("momentum_buffer", momentum=0.8, dampening=0.0, nesterov=False)
    return saved | {"state": {i: {"momentum_buffer": own["momentum_buffer"]} for i, own in saved["state"].items()}}


def _optimi() -> dict[str, Any]:
    marks = {"setup": True, "gradient_release": False, "kahan_sum": False, "decouple_wd": True, "decouple_lr": False}
    saved = _state(
        "exp_avg", "exp_avg_sq", beta1=0.8, beta2=0.95, eps=1e-3, step=torch.tensor(3, dtype=torch.int32), **marks
    )
    for entries in saved["state"].values():
        del entries["step"]
    return saved


def _values(saved: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Every value of a state dict by the name of its parameter, with lr, betas and the like as entries."""
    result = {}
    for group in saved["param_groups"]:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for param, name in zip(group["params"], group.get("param_names", group["params"]), strict=True):
            for key, value in {**saved["state"].get(param, {}), **options}.items():
                result[name, key] = torch.as_tensor(value, dtype=torch.float64).tolist() if value is not None else None
    return result


def _contents(directory: Path) -> dict[Path, bytes | None]:
    """Everything in a directory, with the bytes of its files."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(directory.rglob("*"))}


@contextlib.contextmanager
def _refused(directory: Path, message: str) -> Iterator[None]:
    """What runs in the block fails with ``message``; everything in ``directory`` is as before."""
    before = _contents(directory)
    with pytest.raises((ValueError, OSError), match=message):
        yield
    assert _contents(directory) == before


@pytest.fixture(autouse=True)
def _safetensors() -> None:
    pytest.importorskip("safetensors")


def _name(form: str) -> str:
    return "a.safetensors" if form == "safetensors" else "a.pt"


class TestReplacing:
    @pytest.mark.parametrize("link", [False, True])
    @pytest.mark.parametrize("target", ["torch", "named", "safetensors"])
    @pytest.mark.parametrize("source", ["torch", "safetensors"])
    def test_out_may_be_in(self, source: str, target: str, link: bool, tmp_path: Path) -> None:
        path, out = tmp_path / "a.safetensors", tmp_path / ("b.safetensors" if link else "a.safetensors")
        form = {"torch": "compiled_optim"}.get(source, source)
        saved = _adamw()
        files.write(saved, path, "safetensors")
        if form != "safetensors":
            path.unlink()
            torch.save(saved, path)
        if link:
            for suffix in (".safetensors", ".json"):
                os.link(path.with_suffix(suffix), out.with_suffix(suffix))
        before = _contents(tmp_path)
        files.write(files.read(path), out, target)
        assert _values(files.read(out)) == _values(saved)
        assert _values(files.read(path)) == _values(saved)
        assert set(_contents(tmp_path)) == set(before)
        if link:
            assert path.read_bytes() == before[path]

    @pytest.mark.parametrize("form", [*FORMS, "dcp"])
    @pytest.mark.parametrize("exists", [False, True])
    def test_a_symbolic_link_stays(self, exists: bool, form: str, tmp_path: Path) -> None:
        if exists:
            files.write(_adamw(), tmp_path / "file.safetensors", "safetensors" if form == "safetensors" else "torch")
        (tmp_path / _name(form)).symlink_to("file.safetensors")
        with _refused(tmp_path, "is in the way"):
            files.write(_adamw(), tmp_path / _name(form), form)
        assert (tmp_path / _name(form)).is_symlink()

    def test_a_source_folder_is_only_read(self, tmp_path: Path) -> None:
        files.write(_adamw(), tmp_path / "folder", "dcp")
        (tmp_path / "link").symlink_to("folder")
        for target in ("folder/a.pt", "link/a.pt"):
            with _refused(tmp_path, "which is only read"):
                files.convert(tmp_path / "folder", tmp_path / target, "torch")

    def test_a_mapped_source_survives_the_loss_of_its_file(self, tmp_path: Path) -> None:
        files.write(_adamw(), tmp_path / "a.safetensors", "safetensors")
        content = files.read(tmp_path / "a.safetensors")
        os.truncate(tmp_path / "a.safetensors", 0)  # a mapping of it would now end the process
        assert _values(content) == _values(_adamw())

    @pytest.mark.parametrize("name", ["x.json", "x.pt", "x"])
    def test_safetensors_have_their_suffix(self, name: str, tmp_path: Path) -> None:
        with _refused(tmp_path, f"{name} must end in .safetensors"):
            files.write(_adamw(), tmp_path / name, "safetensors")

    @pytest.mark.parametrize("text", ['{"hidden_size": 64}', "[1, 2]", "", '{"param_groups": [{"lr": 1}]}'])
    @pytest.mark.parametrize("exists", [False, True])
    def test_json_of_something_else_stays(self, text: str, exists: bool, tmp_path: Path) -> None:
        if exists:
            files.write(_adamw(), tmp_path / "config.safetensors", "safetensors")
        (tmp_path / "config.json").write_text(text)
        with _refused(tmp_path, "config.json is damaged, or not the groups of an optimizer"):
            files.write(_adamw(), tmp_path / "config.safetensors", "safetensors")

    @pytest.mark.parametrize("form", FORMS)
    def test_what_holds_no_optimizer_stays(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / _name(form)
        weights = {"fc.weight": torch.ones(2)}
        others: dict[str, Callable[[], object]] = {
            "text": lambda: path.write_text("remember the milk"),
            "empty": lambda: path.write_bytes(b""),
            "weights": lambda: torch.save(weights, path),
            "beside": lambda: torch.save({**_adamw(), "model": weights}, path),
            "several": lambda: torch.save({"model": weights, "optimizer": _adamw()}, path),
            "directory": path.mkdir,
            "safetensors": lambda: importlib.import_module("safetensors.torch").save_file(weights, path),
        }
        for kind, make in others.items():
            make()
            with _refused(tmp_path, f"{path.name} is in the way"):
                files.write(_adamw(), path, form)
            path.rmdir() if kind == "directory" else path.unlink()

    @pytest.mark.parametrize("form", FORMS)
    def test_what_is_write_protected_stays(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / _name(form)
        files.write(_adamw(), path, form)
        path.chmod(0o444)
        with _refused(tmp_path, "write-protected"):
            files.write(_adamw(), path, form)

    @pytest.mark.parametrize("form", FORMS)
    def test_permissions(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / _name(form)
        (tmp_path / "blank").touch()
        files.write(_adamw(), path, form)
        made = [p for p in tmp_path.iterdir() if p.stem == "a"]
        assert {p.stat().st_mode for p in made} == {(tmp_path / "blank").stat().st_mode}
        for p in made:
            p.chmod(0o640)
        files.write(_adamw(), path, form)
        assert {p.stat().st_mode & 0o777 for p in made} == {0o640}

    @pytest.mark.parametrize("exists", [False, True])
    @pytest.mark.parametrize("form", FORMS)
    def test_a_full_disk(self, form: str, exists: bool, tmp_path: Path) -> None:
        (tmp_path / "whole").mkdir()
        files.write(_adamw(), tmp_path / "whole" / _name(form), form)
        sizes = {len(content) for content in _contents(tmp_path / "whole").values()}
        path = tmp_path / _name(form)
        if exists:
            files.write(_sgd(), path, form)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (0, *(size - 1 for size in sizes)):
            with _refused(tmp_path, f"{path.name} cannot be written, and is as it was"):
                try:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
                    files.write(_adamw(), path, form)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    @pytest.mark.parametrize("form", FORMS)
    def test_no_directory(self, form: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("a file")
        for directory in ("none", "file"):
            with _refused(tmp_path, "cannot be written"):
                files.write(_adamw(), tmp_path / directory / _name(form), form)

    @pytest.mark.parametrize("exists", [False, True])
    @pytest.mark.parametrize("suffix", [".json", ".safetensors"])
    def test_both_files_or_none(self, suffix: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.safetensors"
        if exists:
            files.write(_sgd(), path, "safetensors")
        replace = os.replace
        present = []

        def fails_once(source: Path, target: Path) -> None:
            present.append({p.name for p in Path(source).parent.iterdir()})
            if Path(target).suffix == suffix:
                monkeypatch.setattr(os, "replace", replace)
                raise PermissionError(1, "not permitted")
            replace(source, target)

        monkeypatch.setattr(os, "replace", fails_once)
        with _refused(tmp_path, "not permitted"):
            files.write(_adamw(), path, "safetensors")
        assert present[0] >= {"a.safetensors", "a.json"}

    @pytest.mark.parametrize("form", FORMS)
    def test_a_step_count_is_not_rounded(self, form: str, tmp_path: Path) -> None:
        saved, path = _adamw(), tmp_path / _name(form)
        for entries in saved["state"].values():
            entries["step"] = torch.tensor(2.0**24 + 1, dtype=torch.float64)
        if form == "torch":
            with _refused(tmp_path, r"the step of .* must be a number in \[0, 16777216\)"):
                files.write(saved, path, form)
            return
        files.write(saved, path, form)
        kept = files.read(path)
        counts = [
            entries["step"]
            for holder in (kept["state"].values(), kept["param_groups"])
            for entries in holder
            if "step" in entries
        ]
        assert {float(count) for count in counts} == {2.0**24 + 1}

    @pytest.mark.parametrize("exists", [False, True])
    def test_an_interrupt_between_the_two(self, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.safetensors"
        if exists:
            files.write(_sgd(), path, "safetensors")
        before = _contents(tmp_path)
        replace = os.replace

        def interrupted(source: Path, target: Path) -> None:
            if Path(target) == path:
                monkeypatch.undo()
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.write(_adamw(), path, "safetensors")
        assert _contents(tmp_path) == before

    def test_groups_beside_do_not_replace_tensors(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        files.write(_adamw(), path, "safetensors")
        groups = json.loads((tmp_path / "a.json").read_text())
        groups["state"] = {"scale": {"step": 0.0}}
        (tmp_path / "a.json").write_text(json.dumps(groups))
        assert _values(files.read(path)) == _values(_adamw())


class TestNothingIsLost:
    def test_numbers_keep_their_bits(self, tmp_path: Path) -> None:
        saved = _adamw()
        saved["state"][0] |= {"product": 0.1, "count": 2**53 + 1, "flag": True}
        files.write(saved, tmp_path / "a.safetensors", "safetensors")
        entries = files.read(tmp_path / "a.safetensors")["state"]["fc.weight"]
        assert [entries[k].item() for k in ("product", "count", "flag")] == [0.1, 2**53 + 1, True]

    def test_tensors_that_share_memory_or_lie_otherwise(self, tmp_path: Path) -> None:
        saved = _adamw()
        whole = torch.arange(12.0).reshape(3, 4)
        saved["state"][0] |= {"exp_avg": whole.T, "exp_avg_sq": torch._neg_view(whole.T)}
        for form in ("safetensors", "named"):
            files.write(saved, tmp_path / f"{form}.safetensors", form)
            entries = files.read(tmp_path / f"{form}.safetensors")["state"]["fc.weight"]
            assert torch.equal(entries["exp_avg"], whole.T)
            assert torch.equal(entries["exp_avg_sq"], -whole.T)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s["state"].update({7: {"exp_avg": torch.ones(1)}}), "state of 7 belongs to no parameter"),
            (lambda s: s["param_groups"][1].update(params=["1"], param_names=None), "some parameters by name and others"),
            (lambda s: s["state"][0].update({"a.b": torch.ones(1)}), "'a.b' of 'fc.weight' has a dot in its name"),
            (lambda s: s["state"][0].update(old_dirs=[torch.ones(1)]), "'old_dirs' of 'fc.weight' is a list"),
            (
                lambda s: s["state"][0].update(z=torch.ones(1, dtype=torch.complex128)),
                "'z' of 'fc.weight' is a torch.complex128",
            ),
            (lambda s: s["param_groups"][0].update(lr=1j), "holds a complex, which JSON cannot hold"),
        ],
    )
    def test_what_would_be_lost_is_refused(self, change: Any, message: str, tmp_path: Path) -> None:
        saved = _adamw()
        change(saved)
        with _refused(tmp_path, message):
            files.write(saved, tmp_path / "a.safetensors", "safetensors")

    @pytest.mark.parametrize("make", [_adamw, _optimi])
    @pytest.mark.parametrize("form", [*files.WRITTEN])
    def test_entries_beside_the_optimizer_s(self, form: str, make: Any, tmp_path: Path) -> None:
        saved = {**make(), "model": {"w": torch.ones(2)}, "epoch": 5}
        torch.save(saved, tmp_path / "in.pt")
        out = {"safetensors": "a.safetensors", "dcp": "a"}.get(form, "a.pt")
        if form in ("compiled_optim", "named"):
            files.convert(tmp_path / "in.pt", tmp_path / out, form)
            assert torch.load(tmp_path / out)["epoch"] == 5
            return
        for target in (out, "in.pt") if out == "a.pt" else (out,):
            with _refused(tmp_path, "beside the optimizer's state it holds 'model', 'epoch', which would be lost"):
                files.convert(tmp_path / "in.pt", tmp_path / target, form)


class TestWhatOthersKeep:
    @pytest.mark.parametrize("form", ["torch", "compiled_optim", "named"])
    @pytest.mark.parametrize("make", [_adamw, _optimi], ids=["torch", "optimi"])
    def test_goes_along(self, form: str, make: Any, tmp_path: Path) -> None:
        saved = make()
        saved["state"]["ema"] = {"step": 3, "decay": 0.5}
        if make is _adamw:
            saved["state"][0]["slow"] = torch.full((2,), 0.5)
        files.write(saved, tmp_path / "a.pt", form)
        files.write(files.read(tmp_path / "a.pt"), tmp_path / "b.pt", "compiled_optim")
        state = files.read(tmp_path / "b.pt")["state"]
        assert state["ema"] == {"step": 3, "decay": 0.5}
        assert make is not _adamw or torch.equal(state[0]["slow"], torch.full((2,), 0.5))

    @pytest.mark.parametrize("form", ["safetensors", "optimi"])
    def test_is_refused_where_it_has_no_place(self, form: str, tmp_path: Path) -> None:
        saved = _adamw()
        saved["state"]["ema_step"] = 3
        with _refused(tmp_path, f"the state holds 'ema_step', .* has no counterpart in {form}"):
            files.write(saved, tmp_path / _name(form), form)

    @pytest.mark.parametrize(("key", "form"), [("fc.bias", "named"), (1, "compiled_optim")])
    def test_under_the_key_of_a_parameter_is_refused(self, key: Any, form: str, tmp_path: Path) -> None:
        saved = _adamw()
        if form == "compiled_optim":
            files.write(saved, tmp_path / "named.pt", "named")
            saved = files.read(tmp_path / "named.pt")
            (tmp_path / "named.pt").unlink()
        saved["state"][key] = "mine"
        with _refused(tmp_path, f"the state holds {key!r}, which is no parameter's state but has the key of one"):
            files.write(saved, tmp_path / "a.pt", form)


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    with _refused(tmp_path, f"{tmp_path} is a folder, and neither a checkpoint of torch.distributed nor DeepSpeed's"):
        files.convert(tmp_path, tmp_path.with_name("converted.pt"), to="torch")


class TestBadValues:
    """Of state dicts that a file may hold: each is named in the message."""

    @pytest.mark.parametrize(
        "step",
        ["many", None, -1.0, 0.5, float("nan"), 2**60, 10**400, torch.ones(2), torch.ones(1).to_sparse(), 1j, []],
        ids=str,
    )
    def test_steps(self, step: Any, tmp_path: Path) -> None:
        for form in FORMS:
            saved = _adamw()
            saved["state"][1]["step"] = step
            with _refused(tmp_path, r"\['step'\]|the step of (1|'fc.bias')|a step in param_groups\[0\]"):
                files.write(saved, tmp_path / _name(form), form)

    @pytest.mark.parametrize(
        "betas", [0.9, (0.9,), (0.9, 0.99, 0.999), (0.9, 1.0), ("0.9", "0.99"), None, torch.ones(3), [[], []]]
    )
    def test_betas(self, betas: Any, tmp_path: Path) -> None:
        saved = _adamw()
        saved["param_groups"][1]["betas"] = betas
        with _refused(tmp_path, r"param_groups\[1\]"):
            files.write(saved, tmp_path / "a.pt", "optimi")

    @pytest.mark.parametrize("key", ["momentum", "dampening", "lr", "weight_decay"])
    def test_missing_options(self, key: str, tmp_path: Path) -> None:
        saved = _sgd()
        del saved["param_groups"][1][key]
        with _refused(tmp_path, rf"param_groups\[1\] has no {key}, which optimi needs"):
            files.write(saved, tmp_path / "a.pt", "optimi")

    @pytest.mark.parametrize(
        "value",
        [
            threading.Lock(),
            lambda: None,
            {1, 2},
            torch.zeros(1).expand(10**12),
            torch.empty(3, device="meta"),
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            torch.zeros(2, dtype=torch.float8_e4m3fn),
            *({key: 3} for key in ((1, 2), (), None, b"", torch.ones(2))),
        ],
        ids=lambda v: type(v).__name__,
    )
    def test_no_form_holds_it(self, value: Any, tmp_path: Path) -> None:
        for form in FORMS:
            for place in (lambda s: s["state"][0], lambda s: s["param_groups"][0]):
                saved = _adamw()
                place(saved)["odd"] = value
                with _refused(tmp_path, r"\['odd'\]"):
                    files.write(saved, tmp_path / _name(form), form)

    def test_nesting(self, tmp_path: Path) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        cycle: list[Any] = []
        cycle.append(cycle)
        for value in (deep, cycle):
            for form in FORMS:
                saved = _adamw()
                saved["param_groups"][0]["params"] = value
                with _refused(tmp_path, "nested too deeply"):
                    files.write(saved, tmp_path / _name(form), form)

    def test_nested_json(self, tmp_path: Path) -> None:
        """Also as deep as a parser just bears, and whoever shows it does not."""
        path = tmp_path / "a.safetensors"
        files.write(_adamw(), path, "safetensors")
        for depth in (10, 100, *range(900, 1010), 100_000):
            (tmp_path / "a.json").write_text('{"param_groups": [{"params": ' + "[" * depth + "]" * depth + "}]}")
            with _refused(tmp_path, "a.json is damaged, or not the groups of an optimizer"):
                files.read(path)


class TestCommand:
    def test_converts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As ``tools/convert``, which starts it in the caller's directory."""
        loader = importlib.machinery.SourceFileLoader("convert", str(ROOT / "tools" / "convert"))
        launcher = importlib.util.module_from_spec(importlib.util.spec_from_loader("convert", loader))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(launcher)
        extras: list[str] = []
        monkeypatch.setattr(launcher, "python_with", lambda extra: extras.append(extra) or sys.executable)
        monkeypatch.setattr(sys, "argv", ["tools/convert", "in.pt", "out.pt", "--to", "named", "--key", "optimizer"])
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.chdir(tmp_path)
        torch.save({"model": {}, "optimizer": _adamw()}, "in.pt")
        assert launcher.main() == 0
        saved = torch.load("out.pt", weights_only=True)
        assert set(saved["state"]) == set(TENSORS)
        assert _values(saved) == _values(_adamw())
        [extra] = extras
        assert f'\n{extra} = ["safetensors' in (ROOT / "pyproject.toml").read_text()

    def test_arguments_are_answered_before_anything_is_installed(self, tmp_path: Path) -> None:
        for folder in ("tools", "compiled_optim/cli"):
            (tmp_path / folder).mkdir(parents=True)
        for name in ("convert", "environment.py", "progress.py"):
            shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
        shutil.copy(ROOT / "compiled_optim" / "cli" / "convert.py", tmp_path / "compiled_optim" / "cli")
        before = _contents(tmp_path)
        mistakes = [[], ["a"], ["a", "b"], ["a", "b", "--to", "pickle"], ["a", "b", "--to", "torch", "--force"]]
        for arguments in (["--help"], *mistakes):
            command = [
                sys.executable,
                "-S",
                "-B",
                tmp_path / "tools" / "convert",
                *arguments,
            ]  # -S: without any installed package
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == (2 if arguments in mistakes else 0)
            assert (done.stderr if arguments in mistakes else done.stdout).startswith("usage: tools/convert ")
        assert _contents(tmp_path) == before

    def test_a_failure_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        torch.save({"epoch": 3}, "in.pt")
        files.write(_adamw(), Path("a.safetensors"), "safetensors")
        Path("a.json").write_text("[" * 100_000)
        tensor = torch.arange(4000.0).reshape(100, 40)
        torch.save({"state": {}, "param_groups": [{"params": [tensor]}]}, "lines.pt")
        torch.save({"state": threading.Lock, "param_groups": []}, "hostile.pt")
        before = _contents(tmp_path)
        for source, message in {
            "in.pt": "in.pt: not an optimizer state dict: it must be a dict with 'state' and 'param_groups'; "
            "it holds 'epoch': choose by key (--key)\n",
            "a.safetensors": "a.json is damaged, or not the groups of an optimizer (",
            "lines.pt": "lines.pt: param_groups[0]['params'] must be integers or names, got ",
            "hostile.pt": "hostile.pt is damaged, or holds objects other than tensors and plain values",
            "none.pt": "[Errno 2] No such file or directory: 'none.pt'\n",
        }.items():
            assert main(["convert", source, "out.pt", "--to", "named"]) == 2
            printed = capsys.readouterr()
            assert printed.out == ""
            assert printed.err.startswith(f"compiled-optim convert: {message}")
            assert printed.err.count("\n") == 1
            assert len(printed.err) < 1100
        with pytest.raises(OSError, match="No such file"):
            main(["convert", "none.pt", "out.pt", "--to", "named", "--traceback"])
        assert _contents(tmp_path) == before

    def test_in_place(self, tmp_path: Path) -> None:
        """In a process of its own, which a mapping of an overwritten file would end."""
        files.write(_adamw(), tmp_path / "a.safetensors", "safetensors")
        command = [
            sys.executable,
            "-m",
            "compiled_optim",
            "convert",
            "a.safetensors",
            "a.safetensors",
            "--to",
            "named",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert _values(files.read(tmp_path / "a.safetensors")) == _values(_adamw())


def _attempt(action: Callable[[], Any], *directories: Path) -> Any:
    """What ``action`` returns, or the message with which it fails: with any file as before, and no other exception."""
    before = [_contents(directory) for directory in directories]
    try:
        return action()
    except (ValueError, OSError) as error:
        message = str(error)
    assert message
    assert [_contents(directory) for directory in directories] == before
    return message


class TestFuzz:
    """Whatever is in a file or a state dict is converted, or a ValueError or OSError says why not, and nothing changed."""

    @pytest.fixture(autouse=True)
    def _fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda file: None)

    def test_each_bit_of_an_entry_of_the_archive(self, tmp_path: Path) -> None:
        """One bit marks a record as a folder: torch.load then leaves the memory of its tensor unset."""
        path = tmp_path / "a.pt"
        torch.save(_adamw(), path)
        content, expected, messages = path.read_bytes(), _values(files.read(path)), []
        directory = content.index(b"PK\x01\x02")
        start = content.rindex(b"PK\x01\x02", directory, content.index(b"a/data/1", directory))
        for bit in range(8 * (46 + len("a/data/1"))):
            damaged = bytearray(content)
            damaged[start + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            read = _attempt(lambda: files.read(path), tmp_path)
            if isinstance(read, str):
                messages.append(read)
            else:
                assert _values(read) == expected, bit
        assert sum("'a/data/1' is marked as a folder, or as empty" in message for message in messages) == 1

    def test_a_record_that_says_that_nothing_is_stored_of_it(self, tmp_path: Path) -> None:
        """Whose checksum, of nothing, is right."""
        path = tmp_path / "a.pt"
        torch.save(_adamw(), path)
        content = bytearray(path.read_bytes())
        directory = content.index(b"PK\x01\x02")
        start = content.rindex(b"PK\x01\x02", directory, content.index(b"a/data/1", directory))
        content[start + 16 : start + 24] = bytes(8)  # checksum and stored size
        path.write_bytes(content)
        assert "'a/data/1' is marked as a folder, or as empty" in _attempt(lambda: files.read(path), tmp_path)

    @pytest.mark.full
    @pytest.mark.parametrize("base", [_adamw, _sgd, _optimi])
    def test_state_dicts(self, base: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
        places = random.Random(3)
        for form in FORMS:
            files.write(base(), tmp_path / _name(form), form)
        failures: Counter[bool] = Counter()
        for _ in range(310):
            saved = base()
            for _ in range(places.choice((1, 1, 2, 3))):
                _mutate(saved, places)
            for form in FORMS:
                out = tmp_path / _name(form)
                message = _attempt(lambda form=form, out=out, saved=saved: files.write(saved, out, form), tmp_path)
                failures[message is not None] += 1
                if message is None:
                    files.read(out)
        assert min(failures[True], failures[False]) > 100


_ODD: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, 0, -1, 2.5, float("nan"), float("inf"), 2**31, 2**63, 10**400, -(10**400), 1j)),
    *(lambda v=v: v for v in ("", "x", "step", "fc.weight", b"x", (), (0.9,), (0.9, 0.99, 0.999), ("a", "b"), {1, 2})),
    *(list, dict, object, threading.Lock, lambda: len, lambda: [[[[[[[[[[]]]]]]]]]], lambda: {1: {2: 3}}, lambda: {None: 1}),
    lambda: torch.ones(()),
    lambda: torch.ones(2),
    lambda: torch.ones(0),
    lambda: torch.ones(2, 3, dtype=torch.complex64),
    lambda: torch.ones(2, 3, dtype=torch.complex128),
    lambda: torch.ones(2, dtype=torch.bool),
    lambda: torch.ones(2, dtype=torch.int8),
    lambda: torch.zeros(2, dtype=torch.float8_e5m2),
    lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2),
    lambda: torch.ones(3).to_sparse(),
    lambda: torch.ones(3, device="meta"),
    lambda: torch.ones(1).expand(10**12),
    lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.ones(2, requires_grad=True) * 2,
    lambda: torch._neg_view(torch.ones(2)),
    lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    lambda: [torch.ones(2), torch.ones(2)],
]


def _mutate(saved: dict[str, Any], places: random.Random) -> None:
    """Change, remove, add, double or rename something anywhere in ``saved``."""
    containers = list(_containers(saved))
    container = places.choice(containers)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    kind = places.choice(("change", "change", "change", "remove", "add", "double", "rename"))
    if kind == "add" or not keys:
        value = places.choice(_ODD)()
        container.append(value) if isinstance(container, list) else container.update({places.choice(("odd", 0, 7)): value})
        return
    key = places.choice(keys)
    if kind == "change":
        container[key] = places.choice(_ODD)()
    elif kind == "remove":
        del container[key]
    elif kind == "double":
        container[places.choice(keys)] = copy.copy(container[key])
    elif isinstance(container, dict):
        container[places.choice(("odd", "odd.er", 1, "params", "step", "1"))] = container.pop(key)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _containers(entry)
