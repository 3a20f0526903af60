"""Who else can reach the memory of an array."""

from __future__ import annotations

import weakref
from sys import getrefcount
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import is_on_gpu

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array
    from dbrdist.core.tape.node import Value
    from dbrdist.core.tape.variable import Variable


def _holders(variable: Value | _Probe) -> tuple[int, int]:
    """How many references there are to a Variable's array and to the array that owns its memory."""
    owner = variable._array.base
    return getrefcount(variable._array), getrefcount(owner)


class _Probe:
    """What a Variable looks like whose array nobody else holds."""

    __slots__ = ("_array",)

    def __init__(self) -> None:
        self._array = np.empty(2)[:1]


_ALONE = _holders(_Probe())  # counted rather than known: compiled code and newer interpreters borrow references


def is_private(variable: Variable) -> bool:
    """True if the memory of a Variable's array can be reached through the Variable alone: no view, no raw reference."""
    if _owns_memory(variable._array):
        return _holders(variable)[0] == _ALONE[0]
    is_view = type(variable._array) is np.ndarray and not weakref.getweakrefcount(variable._array)
    return is_view and _owns_memory(variable._array.base) and _holders(variable) == _ALONE


def _owns_memory(a: Array) -> bool:
    """True for an array of NumPy or CuPy with memory of its own, to which there are no weak references."""
    return (type(a) is np.ndarray or is_on_gpu(a)) and a.flags.owndata and not weakref.getweakrefcount(a)
