"""Values by function."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from dbrdist.core.tape.function_node import FunctionHook, FunctionNode


class PrintHook(FunctionHook):
    """Prints each function with its inputs, and in backward with the gradients of its outputs."""

    name = "PrintHook"

    def __init__(self, sep: str | None = None, end: str = "\n", file: TextIO | None = None, flush: bool = True) -> None:
        self.sep, self.end, self.flush = sep, end, flush
        self.file = file

    def _print(self, *words: Any) -> None:
        print(*words, sep=self.sep, end=self.end, file=self.file or sys.stdout, flush=self.flush)

    def forward_preprocess(self, function: FunctionNode, in_data: Any) -> None:
        self._print(f"function\t{function.label}")
        self._print_arrays("input data", in_data)

    def backward_preprocess(self, function: FunctionNode, in_data: Any, out_grad: Any) -> None:
        self._print(f"function\t{function.label}")
        self._print_arrays("input data", in_data)
        self._print_arrays("output gradient", out_grad)

    def _print_arrays(self, title: str, arrays: Any) -> None:
        self._print(title)
        for a in arrays:
            if a is None:
                self._print("(removed)")
            else:
                self._print(f"<variable of shape {a.shape}, {a.dtype}>\n{a}")
