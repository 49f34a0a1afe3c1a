"""What Inductor compiled for a CPU: kept for other processes, found where it is the same, run without Inductor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from new_process import printed_by
from quick_start import OPTIMIZERS
from torch import Tensor

from compiled_optim.memory import cache, torch_compiler
from compiled_optim.memory.torch_compiler import CompiledGraph, obtain_graph
from compiled_optim.memory.torch_internals import default_cache_directory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ is compiled on Linux only")


@pytest.fixture(scope="module")
def later_process() -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes found, the second of which finds the cache filled."""
    first, second = (json.loads(printed_by("quick_start")) for _ in range(2))
    return first, second


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestALaterProcess:
    def test_does_not_import_the_compiler(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert later_process[1][name]["compiler"] == []

    def test_gets_the_same_numbers(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        first, second = later_process
        assert second[name]["result"] == first[name]["result"]

    def test_reports_what_it_loaded(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        found = later_process[1][name]
        assert found["loaded"] == found["compiles"] > 0
        assert 0 < found["reported"] < found["seconds"]
        assert f"{found['loaded']} loaded from the cache" in found["report"]
        assert found["report"].count("\n  loaded in 0.") == found["loaded"]

    @pytest.mark.timing
    def test_steps_at_once(self, name: str, later_process: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert later_process[1][name]["seconds"] <= 0.5


def _scaled(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x * y + 1.5,)


def _scaled_otherwise(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x * y + 2.5,)


def _of_size(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x * y + x.shape[1],)


def _of_the_examples_size(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x * y + 11,)


def _written(x: Tensor, y: Tensor) -> None:
    x.copy_(x * y)


def _like_the_second(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (y * x + 1.5,)


def _convolved(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (torch.conv1d(x.unsqueeze(0), torch.ones(3, 7, 2, dtype=x.dtype)) + y.sum(),)


def _as_float64(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return (x.double() * y + 1.5,)


def _example(dtype: torch.dtype = torch.float32) -> torch_compiler.Example:
    return lambda device: ([torch.ones(7, 11, dtype=dtype, device=device) for _ in range(2)], [[0, 1], [0, 1]])


class Obtained:
    """Graphs that were obtained from a cache, and how many of them had to be compiled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compiled = 0
        self._compile = torch_compiler.compile_graph
        patch.setattr(torch_compiler, "compile_graph", self._counting)

    def __call__(
        self, function: Callable[..., Any] = _scaled, dtype: torch.dtype = torch.float32, **options: Any
    ) -> CompiledGraph | str:
        """The graph of a function with a code object of its own, as each call in the package has."""
        code = function.__code__.replace(co_name=f"{function.__name__}_{self.compiled}")
        own = type(function)(code, function.__globals__)
        return obtain_graph(own, _example(dtype), "cpu", {"cpp.dynamic_threads": True, **options})

    def _counting(self, *args: Any, **kwargs: Any) -> CompiledGraph | str:
        self.compiled += 1
        return self._compile(*args, **kwargs)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory for this package's files; Inductor's are elsewhere."""
    monkeypatch.setattr(cache, "_wanted", lambda: tmp_path / "kept")
    monkeypatch.setattr(cache, "_refused", set())
    return tmp_path / "kept"


@pytest.fixture
def obtained(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[Obtained]:
    torch._dynamo.reset()
    yield Obtained(monkeypatch)
    torch._dynamo.reset()


def _check(graph: CompiledGraph | str, expected: Callable[[Tensor, Tensor], tuple[Tensor]], shape: tuple[int, int]) -> None:
    assert not isinstance(graph, str), graph
    x, y = torch.randn(shape), torch.randn(shape)
    (result,) = graph.run({7: shape[0], 11: shape[1]}, [x, y])
    torch.testing.assert_close(result, expected(x, y)[0])


def test_what_was_compiled_is_found_again(obtained: Obtained) -> None:
    _check(obtained(), _scaled, (5, 3))
    _check(obtained(), _scaled, (100, 33))
    assert obtained.compiled == 1


def test_arguments_that_are_written_to(obtained: Obtained) -> None:
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    expected = x * y * y
    for _ in range(2):
        graph = obtained(_written)
        assert not isinstance(graph, str)
        assert graph.run({7: 5, 11: 3}, [x, y]) == []
    torch.testing.assert_close(x, expected)
    assert obtained.compiled == 1


@pytest.mark.parametrize("other", [_scaled_otherwise, _like_the_second, _as_float64], ids=lambda f: f.__name__)
def test_another_function_is_not_taken_for_it(other: Callable[..., Any], obtained: Obtained) -> None:
    obtained()
    _check(obtained(other), other, (5, 3))
    assert obtained.compiled == 2


def test_a_number_is_not_taken_for_a_size(obtained: Obtained) -> None:
    _check(obtained(_of_the_examples_size), _of_the_examples_size, (5, 3))
    _check(obtained(_of_size), _of_size, (5, 3))
    assert obtained.compiled == 2


def _other_threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 77)


def _other_build(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch_compiler, "build_identity", lambda: "another torch")


def _other_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch_compiler, "processor", lambda: "another processor")


def _other_vectors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def _other_variable(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TORCHINDUCTOR_CPP_WRAPPER_LIKE", "1")


def _other_setting(patch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    patch.setattr(config, "epilogue_fusion", not config.epilogue_fusion)


@pytest.mark.parametrize(
    "change", [_other_threads, _other_build, _other_processor, _other_vectors, _other_variable, _other_setting]
)
def test_nothing_is_found_where_inductor_would_compile_otherwise(
    change: Callable[[pytest.MonkeyPatch], None], obtained: Obtained, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtained()
    with monkeypatch.context() as patch:
        change(patch)
        _check(obtained(), _scaled, (5, 3))
    assert obtained.compiled == 2
    obtained()
    assert obtained.compiled == 2


def test_dtype_and_options_count(obtained: Obtained) -> None:
    obtained()
    obtained(dtype=torch.bfloat16)
    obtained(**{"cpp.dynamic_threads": False})
    assert obtained.compiled == 3


def _replace(path: Path, content: bytes) -> None:
    """Put another file in the place of one that this process may have loaded, whose memory would change with it."""
    path.unlink()
    path.write_bytes(content)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    _replace(path, content)


@pytest.mark.parametrize("damage", [_flip, lambda path: _replace(path, b""), Path.unlink, lambda path: path.chmod(0o666)])
@pytest.mark.parametrize("suffix", ["graph", "so"])
def test_a_damaged_or_foreign_file_is_not_loaded(
    suffix: str, damage: Callable[[Path], object], obtained: Obtained, place: Path
) -> None:
    obtained()
    (path,) = place.glob(f"*.{suffix}")
    damage(path)
    _check(obtained(), _scaled, (5, 3))
    assert obtained.compiled == 2
    obtained()
    assert obtained.compiled == 2


def test_code_that_needs_inductor_runs_and_is_not_kept(obtained: Obtained, place: Path) -> None:
    for _ in range(2):
        graph = obtain_graph(
            type(_convolved)(_convolved.__code__.replace(co_name=f"convolved_{obtained.compiled}"), globals()),
            lambda device: ([torch.ones(7, 11, device=device) for _ in range(2)], [[], []]),
            "cpu",
            {},
        )
        _check(graph, _convolved, (7, 11))
    assert obtained.compiled == 2
    assert not list(place.glob("*.graph"))


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_nothing_is_loaded_where_compilation_is_switched_off(
    variable: str, obtained: Obtained, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtained()
    monkeypatch.setenv(variable, "1")
    obtained()
    assert obtained.compiled == 2  # here the variable comes too late for torch.compile, which is asked


def test_a_process_in_which_compilation_is_switched_off_by_a_setting(obtained: Obtained) -> None:
    with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE=1 does
        assert obtained() == "torch.compile is switched off"


def test_a_directory_that_cannot_be_written(obtained: Obtained, place: Path) -> None:
    place.touch()
    with pytest.warns(RuntimeWarning, match="compiled code is not kept") as caught:
        _check(obtained(), _scaled, (5, 3))
    assert len(caught) == 1
    assert obtained.compiled == 1


def test_inductors_directory_is_known_without_importing_it() -> None:
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    assert default_cache_directory() == str(Path(default_cache_dir()).absolute())
