"""Choices for the parameters of a model by their names: groups for an optimizer, and dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compiled_optim.groups.parameters import alternatives, matches, names_and_tensors
from compiled_optim.groups.per_parameter import first_matches

Model: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
Key: TypeAlias = str | type[nn.Module]
_CALLED_A_WEIGHT = re.compile(r"(weight|kernel|proj|attn|(^|[._])w\d*(_|$))[^.]*$|\.parametrizations\.[^.]*weight[^.]*\.")
_HEADS = ("lm_head", "head", "output", "classifier", "fc", "score")  # names in models of the last linear map


class Listed(NamedTuple):
    """A tensor of a model, with all of its names."""

    tensor: Tensor
    names: list[str]


def param_groups(model: Model, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups by name, for an optimizer of this package or of torch.optim.

    ``co.AdamW(co.param_groups(model, {"*.bias|*norm*": dict(weight_decay=0), "embed.*": dict(lr=1e-4)}), lr=1e-3)``

    A pattern is shell-style, or several with ``|`` between them; ``*`` matches dots too, and case matters. Names match with
    and without the prefixes of module wrappers. Parameters that match no pattern form the last group, with the optimizer's
    defaults. A parameter must not match two patterns, so their order does not matter. Only a last pattern ``"*"`` may
    overlap: it takes all parameters that no other pattern matches.

    Args:
        model: a module, or its parameters as ``(name, parameter)`` pairs or as a dict ``name -> parameter``.
        patterns: maps each pattern to the options of its group, such as ``lr`` and ``weight_decay``.

    Returns:
        The groups in the order of their patterns, with ``(name, parameter)`` pairs in the order of the model. Frozen
        parameters are included. A tied one appears once, under its first name; any of its names may match.

    Raises:
        TypeError: an argument has another type than described here.
        ValueError: a pattern matches no parameter, two match the same one, or options hold ``params``.
    """
    listed = listed_parameters(model)
    if not isinstance(patterns, Mapping):
        raise TypeError(f"patterns must be a dict pattern -> options, got {type(patterns).__name__}")
    for pattern, options in patterns.items():
        _check_pattern(pattern)
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise TypeError(f"the options of the pattern {pattern!r} must be a dict with names, got {options!r}")
        if taken := {"params", "param_names"} & set(options):
            raise ValueError(f"the options of the pattern {pattern!r} hold '{min(taken)}', which comes from the model")
    chosen = first_matches(list(patterns), listed, lambda pattern, entry: matches(pattern, entry.names), "parameter")
    groups: dict[Any, dict[str, Any]] = {pattern: {"params": [], **options} for pattern, options in patterns.items()}
    groups[None] = {"params": []}  # parameters that match no pattern
    for name, entry in listed.items():
        groups[chosen.get(name)]["params"].append((name, entry.tensor))
    return [group for group in groups.values() if group["params"]]


def listed_parameters(model: Model) -> dict[str, Listed]:
    """Return the parameters of ``model`` by first name, each tensor once; ``TypeError`` if it is no :data:`Model`."""
    if isinstance(model, nn.Module):
        model = model.named_parameters(remove_duplicate=False)
    names, tensors = names_and_tensors(model, "model")
    if len(names) != len(tensors):
        raise TypeError("model must be a module, or names and parameters: pairs, as named_parameters() gives, or a dict")
    if foreign := [name for name, tensor in zip(names, tensors, strict=True) if not isinstance(tensor, Tensor)]:
        raise TypeError(f"'{foreign[0]}' of the model is no tensor")
    return _by_first_name(zip(names, tensors, strict=True))


def roles(model: nn.Module) -> dict[int, str]:
    """Return the roles of the weights of ``model``, by ``id``, as inferred from types and order of modules.

    ``"embedding"``; ``"head"``, the last linear map onto as many numbers as an embedding has rows, and the last one of all
    if it is called as heads are; ``"linear"``, any other one; ``"depthwise"``, a convolution's filters for one channel each;
    ``"convolution"``, any other ones; ``"bare"``, 2-dimensional and not called a weight, like a table of decay rates or of
    learned tokens. Earlier maps onto as many numbers are linear: a table of positions may have as many rows as a hidden
    layer has outputs. A weight that is tied to an embedding is an embedding.
    """
    modules = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), Tensor)}
    tables = [module for module in modules.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    sizes = {table.num_embeddings for table in tables}
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    named: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if not is_lazy(param) and param.dim() == 2:
            named.setdefault(id(param), []).append(name)
    result = {key: "bare" for key, names in named.items() if not any(map(_CALLED_A_WEIGHT.search, names))}
    result |= {id(module.weight): "linear" for module in linear.values()}
    onto_rows = [name for name, module in linear.items() if module.out_features in sizes]
    last = [name for name in [*linear][-1:] if name.rpartition(".")[2] in _HEADS]
    result |= {id(linear[name].weight): "head" for name in (*onto_rows[-1:], *last)}
    for module in modules.values():
        if isinstance(module, nn.modules.conv._ConvNd):
            result[id(module.weight)] = "depthwise" if module.groups == module.in_channels > 1 else "convolution"
    return result | {id(table.weight): "embedding" for table in tables}


def to_low_precision(
    model: ModuleT,
    dtype: torch.dtype = torch.bfloat16,
    keep: Key | Iterable[Key] | Mapping[Key, torch.dtype | None] = (),
) -> ModuleT:
    """Convert a model's floating-point parameters, their gradients and floating-point buffers to ``dtype``, in place.

    ``co.to_low_precision(model, keep={nn.Embedding: torch.float32, "*norm*": None, "*rotary*": torch.float32})``

    Integer and complex tensors are not converted. Parameters stay the same objects; tied parameters and buffers stay tied.
    Convert before you make the optimizer: the state of an existing optimizer keeps its dtype. Old and converted tensors are
    in memory together until all are converted, so an error leaves the model as it was.

    Args:
        model: the module.
        dtype: the new dtype of everything that ``keep`` does not name.
        keep: tensors that keep their dtype, or get another one. A key is a pattern of names, as in :func:`param_groups`, or
            a module type, for all tensors inside of such modules. Pass a key, a list of keys, or a dict ``key -> dtype``;
            keys without a dtype, or with None, keep the tensors' dtype.

    Returns:
        The model.

    Raises:
        TypeError: an argument has another type than described here, or a dtype is not floating-point.
        ValueError: a key matches nothing, or two with different dtypes match the same.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    _check_dtype(dtype, "dtype")
    dtypes = _dtypes_by_key(keep)
    listed = _by_first_name(_entries(model))
    kinds = [key for key in dtypes if isinstance(key, type)]
    inside = {key: {id(t) for m in model.modules() if isinstance(m, key) for _, t in _entries(m)} for key in kinds}

    def is_kept(key: Key, entry: Listed) -> bool:
        return matches(key, entry.names) if isinstance(key, str) else id(entry.tensor) in inside[key]

    def differ(first: Key, second: Key) -> bool:
        return dtypes[first] != dtypes[second]

    chosen = first_matches(list(dtypes), listed, is_kept, "parameter or buffer", differ)
    new: dict[Tensor, Tensor] = {}
    for name, entry in listed.items():
        wanted = dtypes.get(chosen.get(name, ""), dtype)
        for tensor in (entry.tensor, entry.tensor.grad if isinstance(entry.tensor, nn.Parameter) else None):
            if tensor is not None and tensor.is_floating_point() and wanted not in (None, tensor.dtype):
                with torch.no_grad():
                    new[tensor] = tensor.to(wanted)

    def converted(tensor: Tensor) -> Tensor:  # a tied one comes again
        replacement = new.get(tensor, tensor)
        return tensor if tensor.dtype == replacement.dtype else replacement

    model._apply(converted)  # type: ignore[no-untyped-call]
    return model


def _entries(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of ``module``, under all of their names."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):  # its methods may list others, or fewer
            if tensor is not None:
                yield f"{prefix}.{name}".removeprefix("."), tensor


def _by_first_name(entries: Iterable[tuple[str, Tensor]]) -> dict[str, Listed]:
    by_id: dict[int, Listed] = {}
    for name, tensor in entries:
        by_id.setdefault(id(tensor), Listed(tensor, [])).names.append(name)
    listed: dict[str, Listed] = {}
    for entry in by_id.values():
        if listed.setdefault(entry.names[0], entry) is not entry:
            raise ValueError(f"two parameters are named '{entry.names[0]}'")
    return listed


def _dtypes_by_key(keep: Any) -> dict[Key, torch.dtype | None]:
    """Return ``keep`` as a dict from key to dtype; None keeps the tensors' dtype."""
    if isinstance(keep, (str, type)):
        keep = (keep,)
    if not isinstance(keep, Iterable):
        raise TypeError(f"keep must be patterns and types of modules, or a dict from these to dtypes, got {keep!r}")
    dtypes = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(keep)
    for key, dtype in dtypes.items():
        if not (isinstance(key, type) and issubclass(key, nn.Module)):
            _check_pattern(key)
        if dtype is not None:
            _check_dtype(dtype, f"the dtype of {key!r}")
    return dtypes


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a string, got {pattern!r}")
    alternatives(pattern)


def _check_dtype(dtype: Any, what: str) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{what} must be a dtype of floating-point numbers, got {dtype!r}")
