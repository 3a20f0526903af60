"""Calls whose arrays are on several devices, or on one and in host memory: an error before anything is computed.

CuPy computes with an array of another GPU over the bus, on a stream that nothing orders with that array's; kernels of
the host would take an array of a GPU for one of theirs.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import Array, device_of, is_array
from dbrdist.core.array.current_device import gpu_arrays, number_of

if TYPE_CHECKING:
    from dbrdist.core.array.types import Number
    from dbrdist.core.tape.function_node import FunctionNode
    from dbrdist.core.tape.variable import Operand

_ndarray = np.ndarray
_number = operator.attrgetter("data.device_id")
# Types of what is no array on a GPU; those of tuples are added as they come.
_NUMBERS: set[type] = {type(None), bool, int, float, str, tuple, list, dict, np.dtype, _ndarray, np.float32, np.float64}


HOST, MIXED = -1, -2


def common_device(data: tuple[Array, ...], held: Iterable[Operand | Number | str | None]) -> int | None:
    """The number of the GPU on which operands are, HOST or MIXED; None where there are no arrays with axes.

    Of what the function holds, such as labels, those on GPUs count: arrays of the host may be masks or tables that it
    sends itself.
    """
    first: int | None = None
    if gpu_arrays.issuperset(map(type, data)):  # nearly always
        numbers = {*map(_number, data)}
        if len(numbers) > 1:
            return MIXED
        (first,) = numbers
        data = ()
    for x in data:
        number = number_of(x)
        if number is None:
            number = HOST if isinstance(x, _ndarray) and x.ndim else first  # an array without axes is a number
        if number != first:
            if first is not None:
                return MIXED
            first = number
    for value in () if _NUMBERS.issuperset(map(type, held)) else held:
        if type(value) not in _NUMBERS:
            number = number_of(value)
            if number is not None and number != first and is_array(value):
                return MIXED
            if isinstance(value, tuple):  # a geometry, for example
                _NUMBERS.add(type(value))
    return first


def are_here(data: tuple[Array, ...], held: Iterable[Operand | Number | str | None]) -> bool:
    """Whether all operands are on this thread's current GPU and what a function holds is no array, as nearly always."""
    if not gpu_arrays.issuperset(map(type, data)) or not _NUMBERS.issuperset(map(type, held)):
        return False
    return {sys.modules["cupy"].cuda.runtime.getDevice()}.issuperset(map(_number, data))


def mixed_devices(call: FunctionNode, data: tuple[Array, ...]) -> MixedDevicesError:
    """The error, with each array's place."""
    places = [f"{i} on {_place(x)}" for i, x in enumerate(data) if is_array(x)]
    held = [f"{name} on {_place(x)}" for name, x in vars(call).items() if is_array(x) and not isinstance(x, _ndarray)]
    of_call = f", and {', '.join(held)}" if held else ""
    return MixedDevicesError(
        f"{call.label}: expected all inputs on one device, got input {', '.join(places)}{of_call}; bring them together "
        "with F.copy(x, device), through which gradients flow, or with to_device"
    )


def refuse_mixed(label: str, **arrays: Operand | Number | str | None) -> None:
    """Raise where arguments of a function, also those that are no operands, are on several devices or on the host."""
    if "cupy" not in sys.modules:
        return
    found: dict[str, Array] = {name: a for name, x in arrays.items() if is_array(a := getattr(x, "_array", x))}
    if common_device(tuple(found.values()), ()) == MIXED:
        places = ", ".join(f"{name} on {_place(x)}" for name, x in found.items())
        raise MixedDevicesError(f"{label}: expected all arguments on one device, got {places}; send them to one")


def _place(x: Array) -> str:
    return "the host" if isinstance(x, _ndarray) else str(device_of(x))


class MixedDevicesError(ValueError, TypeError):
    """Arrays of one call are on several devices; Chainer raises TypeError where one of them is the host."""
