"""The operators of Variables: ``x + y``, ``x[0]``, ``-x``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.core.tape.node import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dbrdist.core.array.types import Index, Number
    from dbrdist.core.tape.variable import Operand, Variable

operators: Any = None  # core.tape.ops, bound by the package (__init__.py)


class Arithmetic(Value):
    """What Variables do under Python's operators: what the primitive of the same name does."""

    __slots__ = ()

    def __add__(self, other: Operand | Number) -> Variable:
        return operators.add(self, other)

    def __radd__(self, other: Operand | Number) -> Variable:
        return operators.add(other, self)

    def __sub__(self, other: Operand | Number) -> Variable:
        return operators.sub(self, other)

    def __rsub__(self, other: Operand | Number) -> Variable:
        return operators.sub(other, self)

    def __mul__(self, other: Operand | Number) -> Variable:
        return operators.mul(self, other)

    def __rmul__(self, other: Operand | Number) -> Variable:
        return operators.mul(other, self)

    def __truediv__(self, other: Operand | Number) -> Variable:
        return operators.div(self, other)

    def __rtruediv__(self, other: Operand | Number) -> Variable:
        return operators.div(other, self)

    def __floordiv__(self, other: Operand | Number) -> Variable:
        return operators.floor_div(self, other)

    def __rfloordiv__(self, other: Operand | Number) -> Variable:
        return operators.floor_div(other, self)

    def __mod__(self, other: Operand | Number) -> Variable:
        return operators.remainder(self, other)

    def __rmod__(self, other: Operand | Number) -> Variable:
        return operators.remainder(other, self)

    def __divmod__(self, other: Operand | Number) -> tuple[Variable, Variable]:
        return self // other, self % other

    def __rdivmod__(self, other: Operand | Number) -> Any:
        return other // self, other % self

    def __pow__(self, other: Operand | Number) -> Variable:
        return operators.power(self, other)

    def __rpow__(self, other: Operand | Number) -> Variable:
        return operators.power(other, self)

    def __neg__(self) -> Variable:
        return operators.neg(self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Variable:
        return operators.absolute(self)

    def __matmul__(self, other: Operand | Number) -> Variable:
        return operators.matmul(self, other)

    def __rmatmul__(self, other: Operand | Number) -> Variable:
        return operators.matmul(other, self)

    def __iter__(self) -> Iterator[Variable]:
        x: Any = self
        if not x.shape:  # Python would take the error of the first index for the end
            raise TypeError("a Variable of one number has no elements to iterate over; float(x) is its number")
        return (operators.getitem(x, i) for i in range(len(x)))

    def __getitem__(self, slices: Index) -> Variable:
        return operators.getitem(self, slices)
