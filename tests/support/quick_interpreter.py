"""Triton's interpreter in a third of the time, with the same results on every processor.

* It replaces the language's operations before a kernel and puts them back behind it. At every call of another function it
  replaces them once more: those of ``triton.language`` are replaced already, those of modules within stay so since the first
  call.
* It computes whether every sum and product of integers overflows, for assertions that are switched off.
* It makes a table of all types whenever it asks for numpy's name of one.
* For every operation it makes anew the type of the result, and what a tensor says of its type, in objects for each size.
* It compares the shapes of two blocks size by size, also where they are the same.
* It cuts where float32 becomes bfloat16, and mistakes subnormal numbers; here both are converted as on a GPU.
* What a masked load does not read is 0 there; on a GPU it may be anything, and here it is large numbers.
* It multiplies matrices with numpy's BLAS, which adds in another order on each processor, even for one element and its
  mirror image; and it takes the bits of bfloat16 for whole numbers there. Here each element adds its products in order.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter


def install() -> None:
    """For this process, which has to run with TRITON_INTERPRET=1."""
    replaced: set[str] = set()
    called: set[interpreter.InterpretedFunction] = set()

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self not in called:
            modules = [value for value in self.fn.__globals__.values() if inspect.ismodule(value)]
            names = {module.__name__ for module in modules if module in (language, language.core)}
            if not names <= replaced:
                interpreter._patch_lang(self.fn)
                replaced.update(names)
            called.add(self)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    numpy_type = interpreter._get_np_dtype
    by_name: dict[str, np.dtype[Any]] = {}

    def known_numpy_type(dtype: language.dtype) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in by_name:
            by_name[name] = numpy_type(dtype)
        return by_name[name]

    interpreter._get_np_dtype = known_numpy_type
    interpreter.InterpreterBuilder.create_dot = _product
    _share_types()
    _convert_bfloat16()
    _leave_undefined()


def _convert_bfloat16() -> None:
    """Let the interpreter convert between float32 and bfloat16 as a GPU does."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def converted(self: Any, source: Any, dtype: Any) -> Any:
        kinds = source.dtype.scalar, dtype.scalar
        if kinds not in ((language.float32, language.bfloat16), (language.bfloat16, language.float32)):
            return cast(self, source, dtype)
        values = torch.from_numpy(np.ascontiguousarray(source.data))
        if kinds[0] == language.float32:
            return interpreter.TensorHandle(values.bfloat16().view(torch.uint16).numpy(), kinds[1])
        return interpreter.TensorHandle(values.view(torch.bfloat16).float().numpy(), kinds[1])

    interpreter.InterpreterBuilder.cast_impl = converted


def _leave_undefined() -> None:
    """Let what a masked load does not read be large numbers."""
    load = interpreter.InterpreterBuilder.create_masked_load

    def filled(self: Any, pointers: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        if other is None:
            dtype = pointers.get_element_ty()
            numbers = np.empty(pointers.data.shape, dtype=interpreter._get_np_dtype(dtype))
            numbers.view(np.uint8).fill(0x7E)
            other = interpreter.TensorHandle(numbers, dtype)
        return load(self, pointers, mask, other, *options, **named)

    interpreter.InterpreterBuilder.create_masked_load = filled


def _product(builder: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    """Return ``a @ b + total``, every element of which adds its products one after the other."""
    rows, columns = (_wide(matrix).astype(total.data.dtype) for matrix in (a, b))
    product = np.zeros_like(total.data)
    for k in range(rows.shape[-1]):
        product += rows[..., :, k, None] * columns[..., None, k, :]
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


def _wide(matrix: Any) -> Any:
    """Return the numbers of a matrix; of bfloat16 the interpreter has the bits."""
    if matrix.dtype.scalar != language.bfloat16:
        return matrix.data
    return (matrix.data.astype(np.uint32) << 16).view(np.float32)


def _share_types() -> None:
    """Have one object for each type of blocks, which knows what tensors of it are like, and leave alone equal shapes."""
    core, semantic = language.core, interpreter.TritonSemantic
    make_type, make_tensor, broadcast = core.block_type.__init__, core.tensor.__init__, semantic.broadcast_impl_value
    types: dict[tuple[Any, ...], language.dtype] = {}

    def known_type(cls: type, element_ty: language.dtype, shape: Any) -> language.dtype:
        pointer = getattr(element_ty, "address_space", 0), getattr(element_ty, "const", False)
        key = element_ty.name, pointer, *map(core._unwrap_if_constexpr, shape)
        if key not in types:
            made = object.__new__(cls)
            make_type(made, element_ty, shape)
            types[key] = made
        return types[key]

    def tensor_of_known_type(self: core.tensor, handle: Any, type: language.dtype) -> None:
        if (known := vars(type).get("_known")) is None:
            make_tensor(self, handle, type)
            type._known = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(known)
            self.handle = handle

    def broadcast_unequal(self: semantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    unwrap = core._unwrap_if_constexpr

    def unwrap_what_is_wrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    plain = {int, float, bool, str, core.tensor, core.dtype, type(None)}
    core._unwrap_if_constexpr = unwrap_what_is_wrapped
    core.block_type.__new__ = known_type
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.tensor.__init__ = tensor_of_known_type
    semantic.broadcast_impl_value = broadcast_unequal
