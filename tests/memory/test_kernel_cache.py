"""Where compiled code is kept, whom it is taken from, and what happens where it cannot be compiled, kept or loaded."""

from __future__ import annotations

import atexit
import functools
import inspect
import linecache
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import copies, give_gradients, sparse_rows

import compiled_optim as co
from compiled_optim.lowering import select
from compiled_optim.lowering.kernels import triton
from compiled_optim.memory import addresses, cache
from compiled_optim.memory.cache import cache_directory, load_kept
from compiled_optim.memory.torch_internals import default_cache_directory

OF_ALL_TESTS = cache_directory()
CONTENT = b"compiled code" * 1000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ is compiled on Linux only")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The directory that is to keep compiled code in this test."""
    addresses.reader()  # takes seconds to compile, so it comes from the cache of all tests
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "placed"))
    monkeypatch.setattr(cache, "_refused", set())
    monkeypatch.setattr(select, "_refused", {})
    for remembered in (cache.compiler, cache._private_directory):
        remembered.cache_clear()
    yield tmp_path / "placed" / "compiled_optim"
    for remembered in (cache.compiler, cache._private_directory):
        remembered.cache_clear()


@pytest.fixture
def no_reader() -> Iterator[None]:
    """Let what reads addresses be compiled again."""
    addresses.reader.cache_clear()
    yield
    addresses.reader.cache_clear()


def _keep(name: str = "code", content: bytes = CONTENT, load: Callable[[Path], bytes] = Path.read_bytes) -> int:
    """Load ``content`` through the cache; returns how often it had to be made."""
    made = []

    def make() -> bytes:
        made.append(name)
        return content

    assert load_kept(name, make, load)[: len(content)] == content
    return len(made)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


class TestPlace:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def test_is_the_users_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert cache_directory() == tmp_path / "home" / ".cache" / "compiled_optim"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_directory() == tmp_path / "xdg" / "compiled_optim"

    def test_is_not_moved_by_what_torch_says_itself(self, tmp_path: Path) -> None:
        from torch._inductor.runtime.runtime_utils import cache_dir

        shared = cache_dir()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == shared
        assert cache_directory() == tmp_path / "home" / ".cache" / "compiled_optim"

    def test_is_beside_inductors_where_a_user_placed_that(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
        assert cache_directory() == tmp_path / "mine" / "compiled_optim"


def test_the_report_says_where_kernels_are_kept(place: Path) -> None:
    optimizer = _stepped(co.AdamW)
    report = co.compile_report(optimizer)
    assert report.cache == str(place)
    assert f"kept in {place}" in str(report)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_or_write_whatever_the_umask(place: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        place.parent.mkdir(mode=0o755)
        _keep()
    finally:
        os.umask(before)
    assert _mode(place) == 0o700
    assert _mode(place / "code") == 0o600


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _swap(path: Path) -> None:
    _keep("other", CONTENT[::-1])
    other = path.with_name("other")
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def _turn_into_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def _turn_into_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: _cut(path, 4096),
        lambda path: _cut(path, len(CONTENT)),
        lambda path: _cut(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        _flip,
        _swap,
        _turn_into_directory,
        _turn_into_link,
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        Path.unlink,
    ],
    ids=["page", "seal", "empty", "longer", "bit", "swapped", "directory", "link", "group", "others", "gone"],
)
def test_what_is_not_as_it_was_written_is_made_again(place: Path, damage: Callable[[Path], object]) -> None:
    path = place / "code"
    assert [_keep(), _keep()] == [1, 0]
    damage(path)
    assert [_keep(), _keep()] == [1, 0]
    assert path.is_file()
    assert not path.is_symlink()
    assert _mode(path) == 0o600


def test_what_does_not_load_is_made_again(place: Path) -> None:
    """A library can be whole and unusable: the system may have changed since it was compiled."""
    _keep()
    refusals = [OSError("libgomp.so.1: cannot open shared object file")]

    def load(path: Path) -> bytes:
        if refusals:
            raise refusals.pop()
        return path.read_bytes()

    assert _keep(load=load) == 1
    assert cache_directory() == place


def _belongs_to_another(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let ``path`` look like another user's, which takes more rights than a test has."""
    inode = path.stat().st_ino

    def elsewhose(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def see(*args: Any, **kwargs: Any) -> os.stat_result:
            status = look(*args, **kwargs)
            return os.stat_result((*status[:4], status.st_uid + (status.st_ino == inode), *status[5:]))

        return see

    for name in ("fstat", "lstat", "stat"):
        monkeypatch.setattr(os, name, elsewhose(getattr(os, name)))


def test_a_file_of_another_user_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _keep()
    with monkeypatch.context() as other:
        _belongs_to_another(other, place / "code")
        assert _keep() == 1
    assert _keep() == 0


def _another_users(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(parents=True)
    _belongs_to_another(monkeypatch, place)


def _writable(mode: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def make(place: Path, _: pytest.MonkeyPatch) -> None:
        place.mkdir(parents=True)
        place.chmod(mode)

    return make


def _in_writable(mode: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def make(place: Path, _: pytest.MonkeyPatch) -> None:
        place.parent.mkdir()
        place.parent.chmod(mode)

    return make


def _in_another_users(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    _belongs_to_another(monkeypatch, place.parent)


def _by_a_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of this user's to a place that is found by another link, in a directory where everybody writes."""
    everybodys, own = place.parent.parent / "everybody's", place.parent.parent / "own"
    everybodys.mkdir()
    own.mkdir()
    everybodys.chmod(0o777)
    (everybodys / "link").symlink_to("../own")
    place.parent.symlink_to(everybodys / "link")


def _a_file(place: Path, _: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    place.touch()


def _under_a_file(place: Path, _: pytest.MonkeyPatch) -> None:
    place.parent.touch()


def _read_only(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path, make: Callable[..., Any] = tempfile.mkstemp) -> Any:
        if dir.samefile(place):
            raise OSError(30, "Read-only file system", str(dir))
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)


def _full(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().parent == place:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


def _homeless(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


UNUSABLE = {
    "another user's": (_another_users, "it belongs to another user"),
    "the group's": (_writable(0o770), "other users can write to it"),
    "everybody's": (_writable(0o1777), "other users can write to it"),
    "a file": (_a_file, "File exists"),
    "under a file": (_under_a_file, "Not a directory"),
    "read-only": (_read_only, "Read-only file system"),
    "full": (_full, "No space left"),
    "nowhere": (_homeless, "no home directory"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_place_is_left_alone_and_said_once(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_so, reason = UNUSABLE[kind]
    make_so(place, monkeypatch)
    named = cache_directory()
    with pytest.warns(RuntimeWarning, match=rf"not kept in {named}: .*{reason}.* XDG_CACHE_HOME") as caught:
        assert _keep() == 1
    assert len(caught) == 1
    assert _keep() == 0  # another warning would be an error
    assert _keep("second") == 1
    private = cache_directory()
    assert private not in (named, place)
    assert _mode(private) == 0o700
    assert sorted(p.name for p in private.iterdir()) == ["code", "second"]
    assert not place.is_dir() or not list(place.iterdir())


def _by_links_of_this_user(place: Path, _: pytest.MonkeyPatch) -> None:
    (place.parent.parent / "elsewhere").mkdir()
    place.parent.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "make_so",
    [_in_writable(0o1777), _in_writable(0o777), _in_another_users, _by_links_of_this_user, _by_a_link],
    ids=["where nobody can rename", "where everybody can", "in another user's", "by links", "by another user's link"],
)
def test_a_directory_of_this_user_is_used_whoever_owns_what_is_above(
    make_so: Callable[..., None], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_so(place, monkeypatch)
    assert [_keep(), _keep()] == [1, 0]
    assert (place / "code").is_file()


def test_a_place_that_cannot_be_executed_from(place: Path) -> None:
    def load(path: Path) -> bytes:
        if path.resolve().parent == place:
            raise OSError(f"{path}: failed to map segment from shared object")
        return path.read_bytes()

    with pytest.warns(RuntimeWarning, match=f"not kept in {place}: .*failed to map segment"):
        _keep(load=load)
    assert _keep(load=load) == 0


def test_nothing_in_a_place_that_others_can_write_is_loaded(place: Path) -> None:
    _keep()
    place.chmod(0o777)
    loaded = []

    def load(path: Path) -> bytes:
        loaded.append(path.resolve().parent)
        return path.read_bytes()

    with pytest.warns(RuntimeWarning, match="other users can write to it; .*a directory of yours"):
        assert _keep(load=load) == 1
    assert loaded == [cache_directory()]


def test_what_is_kept_for_one_process_goes_with_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", lambda *call, **options: at_exit.append(functools.partial(*call, **options)))
    place.parent.touch()
    with pytest.warns(RuntimeWarning, match="not kept"):
        _keep()
    private = cache_directory()
    assert private.is_dir()
    (clean_up,) = at_exit
    clean_up()
    assert not private.exists()


def test_what_loads_nowhere_is_an_error(place: Path) -> None:
    def load(path: Path) -> bytes:
        raise OSError("cannot load")

    with pytest.raises(OSError, match="cannot load"):  # no warning either: the place is not to blame
        _keep(load=load)
    assert cache_directory() == place


def test_another_directory_in_its_place_is_never_loaded_from(place: Path) -> None:
    """Who may write above the directory can move it away, at any moment."""
    _keep()

    def load(path: Path) -> bytes:
        place.rename(place.with_name("moved"))
        place.mkdir()
        (place / "code").write_bytes(b"evil")
        return path.read_bytes()

    assert _keep(load=load) == 0


def test_a_cache_that_is_deleted_while_running_is_made_again(place: Path) -> None:
    _keep()
    shutil.rmtree(place.parent)
    assert [_keep("other"), _keep("other")] == [1, 0]
    assert _mode(place) == 0o700


def test_a_file_is_on_disk_before_it_has_its_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (order.append(name), real(*args)))
    _keep()
    assert order == ["fsync", "replace"]


def test_threads_that_make_the_same_at_once(place: Path) -> None:
    everybody = threading.Barrier(4, timeout=200)
    loaded: list[bytes] = []

    def make() -> bytes:
        everybody.wait()
        return CONTENT

    threads = [threading.Thread(target=lambda: loaded.append(load_kept("code", make, Path.read_bytes))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [content[: len(CONTENT)] for content in loaded] == [CONTENT] * 4
    assert [p.name for p in place.iterdir()] == ["code"]
    assert _keep() == 0


ANSWER = 'extern "C" int answer() { return 42; }'


def _own_compiler() -> str:
    """The command of the compiler that all tests use, asked for without remembering it."""
    return shlex.join(cache.compiler.__wrapped__())


def _compiler(path: Path, script: str) -> str:
    """A compiler that runs ``script``, which may go on with ``compile``; as an environment variable names it."""
    head = f'#!/bin/sh\ncase "$*" in *--version*) echo 1.0; exit;; esac\ncompile() {{ exec {_own_compiler()} "$@"; }}\n'
    path.write_text(head + script)
    path.chmod(0o700)
    return shlex.quote(str(path))


def test_names_of_every_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "cache" \\ für $HOME'
    odd.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(odd))
    monkeypatch.setenv("CXX", _compiler(odd / "a compiler", 'compile "$@"'))
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    assert cache.library(ANSWER).answer() == 42
    assert len(list(odd.glob("compiled_optim/*.so"))) == 1
    assert len(list(odd.iterdir())) == 2  # the compiler too


class TestCompiler:
    def test_with_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", f"env ONE='a b' {_own_compiler()} -DANSWER=42")
        assert cache.library('extern "C" int answer() { return ANSWER; }').answer() == 42

    def test_with_spaces_in_its_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program = tmp_path / "a compiler"
        _compiler(program, 'compile "$@"')
        monkeypatch.setenv("CXX", str(program))
        assert cache.compiler() == (str(program),)

    @pytest.mark.parametrize("missing", ["nothing-like-g++", "g++ 'unclosed", "/"])
    def test_that_is_missing_where_another_is_there(self, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", missing)
        with pytest.warns(RuntimeWarning, match=r"CXX is .* which was not found; \S+ compiles instead") as caught:
            assert cache.library(ANSWER).answer() == 42
        assert len(caught) == 1
        assert cache.library(ANSWER).answer() == 42

    def test_every_word_of_the_command_counts(self, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        command = _own_compiler()
        for number in (1, 2):
            monkeypatch.setenv("CXX", f"{command} -DNUMBER={number}")
            cache.compiler.cache_clear()
            assert cache.library('extern "C" int number() { return NUMBER; }').number() == number
        assert len(list(place.glob("*.so"))) == 2

    def test_leaves_nothing_behind_in_the_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path) -> None:
        """Whoever compiles may be killed at any time, and nobody would clean up after it."""
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", f"ls {shlex.quote(str(place))} > {tmp_path}/seen; exit 1"))
        with pytest.raises(cache.CompilerError):
            cache.library(ANSWER)
        assert (tmp_path / "seen").read_text() == ""
        assert not list(place.iterdir())


def _params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((3, 4), (5, 2))]


def _stepped(kind: type[co.CompiledOptimizer], **options: Any) -> co.CompiledOptimizer:
    """An optimizer after two steps that were right."""
    ours = _params()
    theirs = copies(ours, torch.float64)
    groups = [{"params": [p], "lr": 0.07 * (i + 1)} for i, p in enumerate(ours)]
    optimizer = kind(groups, **options)
    reference = getattr(torch.optim, kind.__name__)([{**g, "params": [q]} for g, q in zip(groups, theirs, strict=True)])
    for seed in range(2):
        give_gradients(ours, theirs, seed)
        if optimizer._gradients == "sparse":
            for i, (own, their) in enumerate(zip(ours, theirs, strict=True)):
                own.grad = sparse_rows(own.grad, i)
                their.grad = own.grad.clone()
        for stepped in (optimizer, reference):
            stepped.step()
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-12, atol=1e-12)
    return optimizer


FAILURES = {
    "says no": ("echo 'no licence for you' >&2; exit 1", "no licence for you"),
    "says nothing": ("exit 1", r"exit status 1\): it says nothing"),
    "is killed": ("kill -9 $$", "exit status -9"),
    "writes nothing": ("exit 0", "made no library"),
    "writes nonsense": ('for last; do :; done; echo nonsense > "$last"', "could not be loaded"),
    "has no OpenMP": ("echo 'fatal error: libgomp.spec: No such file' >&2; exit 1", "libgomp.spec: No such file"),
}


@pytest.mark.usefixtures("fresh_kernels", "no_reader")
class TestNothingCompiles:
    @pytest.mark.parametrize("failure", FAILURES)
    def test_steps_run_eager_and_say_why(self, failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        script, reason = FAILURES[failure]
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", script))
        with pytest.warns(RuntimeWarning, match=rf"^compiled_optim: AdamW runs eager: .*{reason}.*; .* CXX$") as caught:
            optimizer = _stepped(co.AdamW)
        assert len(caught) == 1
        report = co.compile_report(optimizer)
        assert report.lowering == "eager"
        assert report.compiles == 0
        (finding,) = report.findings
        assert finding.name == "slower"
        assert re.search(reason, finding.evidence)
        assert f"slower: {finding.said}" in " ".join(str(report).split())
        assert "install" not in finding.advice  # a compiler is there
        assert ("XDG_CACHE_HOME" in finding.advice) == (failure == "writes nonsense")

    def test_what_is_loaded_by_paths_of_proc_needs_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", FAILURES["writes nonsense"][0]))
        is_there = os.path.isdir
        monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd" and is_there(path))
        with pytest.warns(RuntimeWarning, match="AdamW runs eager: .*could not be loaded.*; mount /proc, by whose paths"):
            _stepped(co.AdamW)

    def test_no_compiler_is_said_once_for_several_rules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "compiler", functools.cache(lambda: ()))
        weight, bias = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
        weight.grad, bias.grad = torch.ones(4, 4), torch.ones(4)
        with pytest.warns(RuntimeWarning, match=r"steps run eager: no C\+\+ compiler was found; install g\+\+") as caught:
            optimizer = co.SGD([{"params": [weight], "rule": co.Muon}, {"params": [bias], "rule": co.AdamW}], lr=0.1)
        optimizer.step()
        assert len(caught) == 1
        assert [finding.name for finding in co.compile_report(optimizer).findings] == ["slower"]

    @pytest.mark.parametrize("lowering", ["auto", "multi_tensor"])
    @pytest.mark.parametrize("kind", [co.SGD, co.SparseAdam, co.Adafactor], ids=lambda c: c.__name__)
    def test_every_kind_of_rule(
        self, kind: type[co.CompiledOptimizer], lowering: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", "exit 1"))
        with pytest.warns(RuntimeWarning, match=f"{kind.__name__} runs eager") as caught:
            optimizer = _stepped(kind, lowering=lowering)
        assert len(caught) == 1
        assert [finding.name for finding in co.compile_report(optimizer).findings] == ["slower"]

    def test_the_compiler_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", f"echo >> {tmp_path}/asked; exit 1"))
        with pytest.warns(RuntimeWarning, match="AdamW runs eager"):
            _stepped(co.AdamW)
        asked = (tmp_path / "asked").stat().st_size
        with pytest.warns(RuntimeWarning, match="AdamW runs eager"):
            assert co.compile_report(_stepped(co.AdamW)).lowering == "eager"
        assert (tmp_path / "asked").stat().st_size == asked

    def test_a_compiler_that_refuses_the_look_at_tensors_alone(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = 'case "$*" in *KEYS_AT*) echo too old >&2; exit 1;; esac; compile "$@"'
        monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", script))
        with pytest.warns(RuntimeWarning, match="AdamW looks at its tensors one by one: .*too old") as caught:
            optimizer = _stepped(co.AdamW)
        assert len(caught) == 1
        assert co.compile_report(optimizer).lowering == "multi_tensor"

    def test_no_room_for_temporary_files(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.warns(RuntimeWarning, match="AdamW runs eager: .*No such file or directory") as caught:
            _stepped(co.AdamW)
        assert len(caught) == 1


@pytest.mark.usefixtures("fresh_kernels")
def test_a_failure_after_a_success_applies_nothing_by_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second of two plans does not compile: the step of both is taken once, eagerly."""
    once = f'[ -e {tmp_path}/one ] && exit 1; touch {tmp_path}/one; compile "$@"'
    monkeypatch.setenv("CXX", _compiler(tmp_path / "cxx", once))
    ours = _params()
    theirs = copies(ours, torch.float64)
    groups = [{"params": [p], "amsgrad": bool(i)} for i, p in enumerate(ours)]
    optimizer = co.AdamW(groups, lr=0.3)
    reference = torch.optim.AdamW([{**g, "params": [q]} for g, q in zip(groups, theirs, strict=True)], lr=0.3)
    give_gradients(ours, theirs, 0)
    with pytest.warns(RuntimeWarning, match="AdamW runs eager"):
        optimizer.step()
    reference.step()
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-12, atol=1e-12)
        assert optimizer.state[own]["step"] == 1


@pytest.mark.full
@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("kind", [co.SGD, co.Adafactor], ids=lambda c: c.__name__)
def test_inductor_without_a_compiler_that_works(kind: type[co.CompiledOptimizer], tmp_path: Path) -> None:
    from torch._inductor import config

    broken = _compiler(tmp_path / "cxx", "echo 'no licence for you' >&2; exit 1")
    with config.patch({"cpp.cxx": (None, broken)}):
        for _ in range(2):  # the second finds out without trying
            with pytest.warns(RuntimeWarning, match=f"{kind.__name__} runs eager: .*no licence for you") as caught:
                optimizer = _stepped(kind, lowering="inductor")
            assert [w.category for w in caught].count(RuntimeWarning) == 1  # importing a compiler warns of other things
            assert [finding.name for finding in co.compile_report(optimizer).findings] == ["slower"]


def test_a_kernel_calls_its_own_functions(tmp_path: Path) -> None:
    """And not those of equal name that the process loaded for all."""
    source, built = tmp_path / "theirs.cpp", tmp_path / "theirs.so"
    names = ("measure", "evaluate", "update", "step")
    source.write_text("\n".join(f'extern "C" void {name}() {{ __builtin_trap(); }}' for name in names))
    subprocess.run([*cache.compiler(), "-shared", "-fPIC", source, "-o", built], check=True)
    program = f"""
import ctypes, torch, compiled_optim as co
ctypes.CDLL({str(built)!r}, ctypes.RTLD_GLOBAL)
param = torch.zeros(3, requires_grad=True)
param.grad = torch.ones(3)
co.SGD([param], lr=0.25, max_grad_norm=100.0, lowering="multi_tensor").step()
assert param.tolist() == [-0.25] * 3
"""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(OF_ALL_TESTS.parent)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.usefixtures("no_reader")
def test_another_layout_of_torchs_objects_has_another_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    flags, offsets = [], addresses._offsets()
    assert offsets is not None

    def note(_: str, given: list[str], *__: Any) -> None:
        flags.append(given)
        raise cache.CompilerError("enough")

    monkeypatch.setattr(cache, "library", note)
    for keys_at in (200, 200, 208):
        monkeypatch.setattr(addresses, "_offsets", lambda at=keys_at: {**offsets, "KEYS_AT": at})
        addresses.reader.cache_clear()
        addresses.reader()
    assert flags[0] == flags[1] != flags[2]


def test_triton_source_is_not_taken_from_disk(place: Path, tmp_path: Path) -> None:
    """What is executed is what was generated; a file with its name in the cache may be damaged, or anybody's."""
    text = f"def kernel():\n    return {str(tmp_path)!r}\n"
    first = triton.load(text)
    del sys.modules[first.__name__]
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{first.__name__.removeprefix('compiled_optim_kernel_')}.py").write_text("raise SystemExit('executed')")
    module = triton.load(text)
    assert module.kernel() == str(tmp_path)
    linecache.checkcache()
    assert inspect.getsource(module.kernel) == text
    assert triton.load(text) is module


@pytest.mark.full
def test_another_user_cannot_have_his_code_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user makes torch's directory in the shared temporary one first, and later replaces what he finds there."""
    shared, home = tmp_path / "tmp", tmp_path / "home"
    shared.mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("HOME", str(home))
    program = (
        "import torch, compiled_optim as co;"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); co.SGD([p], lr=0.5).step(); print(p[0].item())"
    )
    own = home / ".cache" / "compiled_optim"
    own.mkdir(mode=0o700, parents=True)
    readers = [shutil.copy2(p, own) for p in OF_ALL_TESTS.glob("*.so") if b"read_tensors" in p.read_bytes()]
    trap = shared / Path(default_cache_directory()).name / "compiled_optim"
    trap.mkdir(parents=True)
    trap.chmod(0o777)
    assert _run(program) == "0.5"
    text = '#include <cstdio>\n__attribute__((constructor)) static void f() { puts("stolen"); }'
    evil = tmp_path / "evil"
    subprocess.run([*cache.compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", evil], input=text, text=True, check=True)
    for found in shared.rglob("*.so"):
        shutil.copy(evil, found)
    for found in set(home.rglob("*.so")) - set(readers):
        _cut(found, 4096)  # a power cut besides: to load such a file kills the process
    assert _run(program) == "0.5"
    assert all(found.stat().st_size > 4096 for found in home.rglob("*.so"))


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + str(done.returncode)
    return done.stdout.strip()


def test_inductors_directory_is_known_without_importing_it() -> None:
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    assert default_cache_directory() == str(Path(default_cache_dir()).absolute())
