"""Values by function."""

from __future__ import annotations

from typing import TextIO

from dbrdist.core.array.backend import get_array_module
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import Array
from dbrdist.core.files.standard_streams import stdout
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.core.tape.variable import Variable


class PrintHook(FunctionHook):
    """Prints each function with its inputs, and in backward with the gradients of its outputs.

    Args:
        sep: what separates the parts of a line; None is a blank.
        end: what ends a line.
        file: the stream; None is the standard output.
        flush: flush the stream after each line.

    Example:
        >>> with dbrdist.function_hooks.PrintHook():  # doctest: +SKIP
        ...     F.relu(np.ones(1))
    """

    name = "PrintHook"

    def __init__(self, sep: str | None = None, end: str = "\n", file: TextIO | None = None, flush: bool = True) -> None:
        self.sep, self.end, self.flush = sep, end, flush
        self.file = file

    def _print(self, *words: str) -> None:
        print(*words, sep=self.sep, end=self.end, file=self.file or stdout, flush=self.flush)

    def forward_preprocess(self, function: FunctionNode, in_data: tuple[Array, ...]) -> None:
        self._print(f"function\t{function.label}")
        self._print_arrays("input data", in_data)

    def backward_preprocess(
        self, function: FunctionNode, in_data: tuple[Array | None, ...], out_grad: tuple[Array, ...]
    ) -> None:
        self._print(f"function\t{function.label}")
        self._print_arrays("input data", in_data)
        self._print_arrays("output gradient", out_grad)

    def _print_arrays(self, title: str, arrays: tuple[Array | None, ...]) -> None:
        self._print(title)
        for a in arrays:
            if a is None:
                self._print("(removed)")
            elif as_chainer[0]:
                self._print(_described(a, title == "output gradient"))
            else:
                self._print(f"<variable of shape {a.shape}, {a.dtype}>\n{a}")


def _described(a: Array, is_gradient: bool) -> str:
    """An array as Chainer prints it: place, type, shape and statistics of a Variable, or of its gradient."""
    v = Variable(get_array_module(a).zeros_like(a) if is_gradient else a)
    if is_gradient:
        v.grad = a
    return f"<variable at 0x{id(v):x}>\n" + v.debug_print().partition("\n")[2]
