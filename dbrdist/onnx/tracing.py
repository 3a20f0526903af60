"""Traces of a forward pass: every function that a model calls, and where each of its operands comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array.config import config
from dbrdist.core.model.link_hook import ForwardPostprocessArgs, ForwardPreprocessArgs, LinkHook
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.core.tape.variable import Variable


class Input(NamedTuple):
    """An operand that is an argument of the model."""

    index: int


class FromCall(NamedTuple):
    """An operand that an earlier call computed."""

    call: int
    output: int


class Reshaped(NamedTuple):
    """An operand that has the elements of another value in another shape."""

    source: Any
    shape: tuple[int, ...]


class Constant(NamedTuple):
    """An operand that is neither: a parameter, a number, or an array that the program made."""

    array: Any


class TracedCall:
    """One call: the function's name, its node or its attributes, its operands, their sources, and its results."""

    def __init__(self, kind: str, node: Any, xs: tuple[Any, ...], sources: tuple[Any, ...], layer: str) -> None:
        self.kind, self.node, self.xs, self.sources, self.layer = kind, node, xs, sources, layer
        self.ys: tuple[Any, ...] = ()
        self.given = getattr(node, "_for_rule", None)  # labels of a loss, which forward replaces
        self.settings = {k: _without_arrays(v) for k, v in getattr(node, "__dict__", {}).items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(v, np.ndarray) or _is_plain(v) for v in value)
    return value is None or value is Ellipsis or isinstance(value, (bool, int, float, str, slice, np.number))


def _without_arrays(value: Any) -> Any:
    """Parts of indices, of which arrays are compared by what they were computed from."""
    if isinstance(value, (tuple, list)):
        return [Ellipsis if isinstance(v, np.ndarray) else _without_arrays(v) for v in value]
    return value


class CallTrace:
    """The calls of one forward pass in order. Every array stays alive, so that its identity is unique."""

    def __init__(self, arrays: list[Any]) -> None:
        self.calls: list[TracedCall] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        for i, a in enumerate(arrays):
            self.remember(a, Input(i))

    def remember(self, array: Any, source: Any) -> None:
        """Note where an array comes from."""
        self._known[id(array)] = source, array

    def source(self, array: Any) -> Any:
        """Where an operand comes from."""
        found = self._known.get(id(array))
        if found is not None:
            return found[0]
        base = getattr(array, "base", None)
        if base is not None and base.__class__ is np.ndarray:
            for other in (base, *self._views_of(base)):
                if id(other) in self._known and _is_reshaped(array, other):
                    return Reshaped(self._known[id(other)][0], array.shape)
        return Constant(array)

    def _views_of(self, base: Any) -> Iterator[Any]:
        return (a for _, a in list(self._known.values()) if getattr(a, "base", None) is base)

    def add(self, call: TracedCall, ys: tuple[Any, ...]) -> None:
        """Note a call with its results."""
        call.ys = ys
        for j, y in enumerate(ys):
            self.remember(y, FromCall(len(self.calls), j))
        self.calls.append(call)


def _is_reshaped(view: Any, whole: Any) -> bool:
    """Whether a view has all elements of another array in the same order."""
    return bool(
        view.dtype == whole.dtype and view.size == whole.size and view.size
        and view.flags.c_contiguous and whole.flags.c_contiguous and view.ctypes.data == whole.ctypes.data
    )  # fmt: skip


class _Layers(LinkHook):
    """The path of the link that is being called."""

    name = "dbrdist.onnx.layers"

    def __init__(self, model: Any) -> None:
        self.names = (
            {id(link): path or "/" for path, link in model.namedlinks()} if hasattr(model, "namedlinks") else {}
        )
        self.stack: list[str] = []

    @property
    def here(self) -> str:
        """The innermost link, or empty outside of links."""
        return self.stack[-1] if self.stack else ""

    def forward_preprocess(self, args: ForwardPreprocessArgs) -> None:
        self.stack.append(self.names.get(id(args.link)) or type(args.link).__name__)

    def forward_postprocess(self, args: ForwardPostprocessArgs) -> None:
        self.stack.pop()

    def forward_failed(self, args: ForwardPreprocessArgs) -> None:
        self.stack.pop()


TRANSPARENT = {"Forget"}  # functions that hand on what they called before, which has been noted


class _Calls(FunctionHook):
    """Notes every outermost call of a function, with its results."""

    name = "dbrdist.onnx.calls"

    def __init__(self, trace: CallTrace, layers: _Layers) -> None:
        self.trace, self.layers = trace, layers
        self.depth = 0

    def forward_preprocess(self, function: FunctionNode, in_data: tuple[Any, ...]) -> None:
        self.depth += 1
        if self.depth > 1 or type(function).__name__ in TRANSPARENT:
            return
        sources = tuple(self.trace.source(x) for x in in_data)
        call = TracedCall(type(function).__name__, function, in_data, sources, self.layers.here)
        compute = function.forward

        def forward(xs: tuple[Any, ...]) -> Any:
            ys = compute(xs)
            ys = tuple(np.asarray(y) if isinstance(y, np.generic) else y for y in ys)
            self.trace.add(call, ys)
            return ys

        function.forward = forward  # type: ignore[method-assign]

    def forward_postprocess(self, function: FunctionNode, in_data: tuple[Any, ...]) -> None:
        self.depth -= 1
        function.__dict__.pop("forward", None)

    def computed(self, kind: str, attributes: dict[str, Any], xs: tuple[Any, ...], y: Any) -> None:
        """Note a computation that is no function of the tape."""
        if not self.depth:
            sources = tuple(self.trace.source(x) for x in xs)
            self.trace.add(TracedCall(kind, attributes, xs, sources, self.layers.here), (y,))


@contextmanager
def _observer(function: Any) -> Iterator[None]:
    values = config.__dict__
    before, values["_observer"] = values["_observer"], function
    try:
        yield
    finally:
        values["_observer"] = before


def traced(model: Any, arguments: Any, arrays: list[Any]) -> tuple[CallTrace, Any]:
    """Run ``model(*arguments)``, whose arrays are ``arrays``: the trace, and what the model returned."""
    trace = CallTrace(arrays)
    layers = _Layers(model)
    calls = _Calls(trace, layers)
    args, kwargs = arguments
    with layers, calls, _observer(calls.computed):
        return trace, model(*args, **kwargs)


def arrays_in(value: Any) -> list[Any]:
    """The arrays in nested tuples, lists and mappings, in order; Variables count as their arrays."""
    if isinstance(value, Variable):
        return [value.array]
    if isinstance(value, dict):
        return [a for v in value.values() for a in arrays_in(v)]
    if isinstance(value, (tuple, list)):
        return [a for v in value for a in arrays_in(v)]
    return [value] if isinstance(value, np.ndarray) else []


def replaced(value: Any, arrays: Iterator[Any], as_variables: bool) -> Any:
    """The same nested structure with other arrays, or with Variables of them."""
    if isinstance(value, Variable) or (isinstance(value, np.ndarray) and as_variables):
        array = next(arrays)
        return Variable(array, requires_grad=array.dtype.kind in "fV")
    if isinstance(value, dict):
        return {k: replaced(v, arrays, as_variables) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        items = [replaced(v, arrays, as_variables) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(arrays) if isinstance(value, np.ndarray) else value
