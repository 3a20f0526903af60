"""The operators of Variables: ``x + y``, ``x[0]``, ``-x``."""

from __future__ import annotations

from typing import Any

from dbrdist.core.tape.node import Value

operators: Any = None  # core.tape.ops, bound by the package (__init__.py)


class Arithmetic(Value):
    """What Variables do under Python's operators: what the primitive of the same name does."""

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return operators.add(self, other)

    def __radd__(self, other: Any) -> Any:
        return operators.add(other, self)

    def __sub__(self, other: Any) -> Any:
        return operators.sub(self, other)

    def __rsub__(self, other: Any) -> Any:
        return operators.sub(other, self)

    def __mul__(self, other: Any) -> Any:
        return operators.mul(self, other)

    def __rmul__(self, other: Any) -> Any:
        return operators.mul(other, self)

    def __truediv__(self, other: Any) -> Any:
        return operators.div(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return operators.div(other, self)

    def __floordiv__(self, other: Any) -> Any:
        return operators.floor_div(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return operators.floor_div(other, self)

    def __mod__(self, other: Any) -> Any:
        return operators.remainder(self, other)

    def __rmod__(self, other: Any) -> Any:
        return operators.remainder(other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self, other: Any) -> Any:
        return operators.power(self, other)

    def __rpow__(self, other: Any) -> Any:
        return operators.power(other, self)

    def __neg__(self) -> Any:
        return operators.neg(self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return operators.absolute(self)

    def __matmul__(self, other: Any) -> Any:
        return operators.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return operators.matmul(other, self)

    def __getitem__(self, slices: Any) -> Any:
        return operators.getitem(self, slices)
