"""The export of a network: two traces, a graph, a check against onnxruntime."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.files.serializer import write_atomically
from dbrdist.onnx import operators as operators  # its modules declare the converters
from dbrdist.onnx.conversion import CONVERTERS, Conversion, OperatorError
from dbrdist.onnx.graph import OPSET, OnnxGraph
from dbrdist.onnx.operators import elementwise as elementwise
from dbrdist.onnx.operators import layers as layers
from dbrdist.onnx.operators import recurrent as recurrent
from dbrdist.onnx.operators import shapes as shapes
from dbrdist.onnx.tracing import CallTrace, FromCall, Input, Reshaped, TracedCall, arrays_in, replaced, traced

_TOLERANCE = 1e-5


def export(
    model: Callable[..., Any],
    x: Any,
    path: str | os.PathLike[str],
    *,
    train: bool = False,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_batch: bool = False,
    metadata: dict[str, str] | None = None,
    check: bool = True,
) -> list[str]:
    """Write a network as an ONNX file (opset 18), traced by calling it with an example.

    The model is called twice, with ``x`` and with other values of the same shape. A value that differs between both
    calls and that the graph does not compute, such as ``x.array.max()``, is an error: the file would contain it as a
    constant. Control flow is that of the example.

    Args:
        model: a link, or any callable that takes arrays and returns Variables.
        x: the arguments: an array, a tuple of positional arguments or a dict of named ones; each may be a list of
            arrays, as sequences are. Every array becomes an input of the graph.
        path: the file to write. It is written next to the target and then renamed.
        train: whether to export the forward pass of training (``config.train``); default False: batch normalization
            uses its running statistics, and dropout does nothing.
        input_names: one for each array; default ``x``, or ``x0``, ``x1``, ...
        output_names: one for each array that the model returns; default ``y``, or ``y0``, ``y1``, ...
        dynamic_batch: whether the first axis of all inputs and outputs may have any length; default False: the shapes
            are those of ``x``. The model is then also called with one example more.
        metadata: pairs of texts that are stored in the file.
        check: whether to run the file with onnxruntime, if it is installed, and to compare its results with the
            model's; default True.

    Returns:
        The kinds of ONNX operators in the file, sorted.

    Raises:
        OperatorError: a function has no operator; the message names it and its layer. The file is not written.
        ImportError: the package ``onnx`` is not installed (``pip install 'dbrdist[onnx]'``).

    Example:
        >>> import numpy as np, dbrdist.links as L, dbrdist.onnx
        >>> net = L.Linear(3, 2)
        >>> dbrdist.onnx.export(net, np.zeros((4, 3), 'f'), 'linear.onnx')  # doctest: +SKIP
        ['Gemm']
    """
    arrays = arrays_in(x)
    if not arrays:
        raise TypeError("onnx.export: x: expected at least one NumPy array or Variable on the host, got none")
    passes = _Passes(model, x, train)
    first = passes.run(arrays)
    second = passes.run([_with_other_values(a) for a in arrays])
    longer = passes.run_longer(arrays) if dynamic_batch else second
    graph = OnnxGraph(_parameter_names(model))
    names = _names("x", "input_names", input_names, len(arrays))
    builder = _Builder(graph, first, second, longer, [graph.new_name(n) for n in names], dynamic_batch)
    ends = _names("y", "output_names", output_names, len(first.outputs))
    data = _built(builder, arrays, ends, metadata or {})
    if check:
        for tried in (first, second, *([longer] if dynamic_batch else [])):
            _compare(data, builder.inputs, tried)
    write_atomically(path, lambda file: file.write(data))
    return sorted({node.op_type for node in graph.nodes})


def _built(builder: _Builder, arrays: list[Any], ends: list[str], metadata: dict[str, str]) -> bytes:
    """The file."""
    graph = builder.graph
    builder.write_calls()
    outputs = builder.outputs([graph.new_name(n) for n in ends])
    inputs = [(n, a.dtype, builder.declared(a.shape)) for n, a in zip(builder.inputs, arrays)]
    file = graph.model(inputs, outputs, metadata, OPSET, importlib.metadata.version("dbrdist"))
    return bytes(file.SerializeToString())


# ---- the passes -----------------------------------------------------------------------------------------------------


class _Pass:
    """One call of the model: its arrays, the trace, and the arrays of what it returned."""

    def __init__(self, arrays: list[Any], trace: CallTrace, value: Any) -> None:
        self.arrays, self.trace = arrays, trace
        self.outputs = arrays_in(value)
        if not self.outputs:
            raise TypeError(f"onnx.export: the model returned {type(value).__name__}; expected Variables or arrays")


class _Passes:
    """Calls of the model that change neither it nor the process's random numbers."""

    def __init__(self, model: Any, x: Any, train: bool) -> None:
        self.model, self.x, self.train = model, x, train

    def run(self, arrays: list[Any]) -> _Pass:
        """Call the model with Variables, so that indexing and arithmetic count; with arrays if it needs those."""
        try:
            return self._run(arrays, as_variables=True)
        except (AttributeError, TypeError):
            return self._run(arrays, as_variables=False)

    def run_longer(self, arrays: list[Any]) -> _Pass:
        """Call the model with one example more."""
        more = [_with_one_more(a) for a in arrays]
        try:
            return self.run(more)
        except Exception as e:
            raise OperatorError(
                f"onnx.export: the model took a batch of {len(arrays[0])}, but not one of {len(more[0])}, which "
                f"dynamic_batch needs: {type(e).__name__}: {e}; export without dynamic_batch, or use x.shape[0]"
            ) from e

    def _run(self, arrays: list[Any], as_variables: bool) -> _Pass:
        value = replaced(self.x, iter(arrays), as_variables)
        args, kwargs = ((), value) if isinstance(value, dict) else (value if isinstance(value, tuple) else (value,), {})
        mode = using_config("train", self.train)
        with mode, no_backprop_mode(), np.errstate(all="ignore"), _state_kept(self.model):
            return _Pass(arrays, *traced(self.model, (args, kwargs), arrays))


@contextlib.contextmanager
def _state_kept(model: Any) -> Iterator[None]:
    """Running statistics, recurrent states and other attributes of links are afterwards what they were."""
    links = list(model.links()) if hasattr(model, "links") else []
    before = [(link, dict(link.__dict__), _arrays_of(link)) for link in links]
    try:
        yield
    finally:
        for link, attributes, arrays in before:
            for array, values in arrays:
                array[...] = values
            for name, value in link.__dict__.items():
                if name in attributes and attributes[name] is not value:
                    link.__dict__[name] = attributes[name]


def _arrays_of(link: Any) -> list[tuple[Any, Any]]:
    """A link's persistent arrays, with copies of their values."""
    arrays = [getattr(link, name, None) for name in getattr(link, "_persistent", ())]
    return [(a, a.copy()) for a in arrays if isinstance(a, np.ndarray)]


def _with_other_values(a: Any) -> Any:
    """Other values of the same kind: elements change their places, so that ids stay valid and signs occur as before;
    numbers become smaller too, and ids occur in other numbers, so that no sum or maximum stays the same."""
    flat = a.reshape(-1)
    if a.dtype.kind not in "fV":
        found = np.roll(flat, max(a.size // 2 - 1, 1))
        found[: a.size // 3] = flat[:1]
        return found.reshape(a.shape)
    if a.size and (flat == flat[0]).all():
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, a.shape)
        return np.asarray(a + noise, a.dtype)
    return (np.roll(flat, max(a.size // 2 - 1, 1)) * a.dtype.type(0.75)).reshape(a.shape)


def _with_one_more(a: Any) -> Any:
    """One example more, a copy of the first."""
    if not a.ndim or not len(a):
        raise OperatorError("onnx.export: dynamic_batch needs inputs whose first axis is the batch, with an example")
    return np.concatenate([_with_other_values(a), a[:1]])


def _parameter_names(model: Any) -> dict[int, str]:
    """The paths of a model's arrays, by the identity of the array."""
    found: dict[int, str] = {}
    if hasattr(model, "namedlinks"):
        for path, link in model.namedlinks():
            own = {p.name: p.array for p in link.params(include_uninit=False) if link.__dict__.get(p.name) is p}
            own |= {n: getattr(link, n, None) for n in getattr(link, "_persistent", ())}
            for name, array in own.items():
                if isinstance(array, np.ndarray):
                    found[id(array)] = f"{path}/{name}".strip("/").replace("/", ".")
    return found


# ---- the graph ------------------------------------------------------------------------------------------------------


class _Builder:
    """Writes the calls of a trace into a graph, comparing it with the trace of other values."""

    def __init__(self, graph: OnnxGraph, first: _Pass, second: _Pass, longer: _Pass, inputs: list[str], dynamic: bool):
        self.graph, self.first, self.second, self.longer = graph, first, second, longer
        self.inputs, self.dynamic = inputs, dynamic
        self.results: list[list[str]] = []
        self._batch_name = ""
        for other in (second, longer):
            _require_same_calls(first.trace, other.trace)

    def write_calls(self) -> None:
        """Convert every call."""
        calls = zip(self.first.trace.calls, self.second.trace.calls, self.longer.trace.calls)
        for call, second, longer in calls:
            self.graph.layer = call.layer
            self.results.append(self._converted(call, second, longer))

    def _converted(self, call: TracedCall, second: TracedCall, longer: TracedCall) -> list[str]:
        converter = CONVERTERS.get(call.kind)
        label = getattr(call.node, "label", call.kind)
        try:
            _require_same_settings(call, second)
            if converter is None:
                raise OperatorError(f"no converter to ONNX operators for {call.kind}")
            dtype = next((np.dtype(x.dtype) for x in call.xs if isinstance(x, np.ndarray)), call.ys[0].dtype)
            names = [
                self._name(s, s2, s3, call, dtype)
                for s, s2, s3 in zip(call.sources, second.sources, longer.sources)
            ]  # fmt: skip

            def name_of(array: Any) -> str:
                return self._kept_name(array, call, second, longer)

            found = converter(self.graph, Conversion(self.graph, call, longer, names, name_of, self._batch))
        except OperatorError as error:
            where = f" in layer {call.layer}" if call.layer else ""
            raise OperatorError(f"onnx.export: {label}{where}: {error}") from None
        return found if isinstance(found, list) else [found]

    def _kept_name(self, array: Any, call: TracedCall, second: TracedCall, longer: TracedCall) -> str:
        """The name of an array that a node keeps, found among those of the other passes by its attribute."""
        for find in _PLACES:
            if find(call) is array:
                sources = (p.trace.source(find(c)) for p, c in
                           zip((self.first, self.second, self.longer), (call, second, longer)))  # fmt: skip
                return self._name(*sources, call)
        return self._name(*(self.first.trace.source(array),) * 3, call)

    def _name(self, source: Any, second: Any, longer: Any, call: TracedCall, dtype: DTypeLike | None = None) -> str:
        if isinstance(source, Input):
            return self.inputs[source.index]
        if isinstance(source, FromCall):
            return self.results[source.call][source.output]
        if isinstance(source, Reshaped):
            other = getattr(longer, "shape", source.shape)
            inner = self._name(source.source, None, None, call)
            if other != source.shape and [a for a, b in zip(source.shape, other) if a != b] == [source.shape[0]]:
                return self.graph.reshape(inner, (-1, *source.shape[1:]))
            return self.graph.reshape(inner, source.shape)
        return self._constant(source.array, second, longer, dtype)

    def _constant(self, array: Any, second: Any, longer: Any, dtype: DTypeLike) -> str:
        """A constant, after making sure that it is one."""
        a = array if isinstance(array, np.ndarray) else np.asarray(array, dtype)
        if second is not None and not _is_equal(a, second.array, dtype):
            raise OperatorError(
                f"an operand of shape {a.shape} depends on the values of the inputs, but was computed outside of the "
                "graph; the file would contain it as a constant. Compute it with functions of dbrdist"
            )
        if longer is None or _is_equal(a, longer.array, dtype):
            return self.graph.constant(array if isinstance(array, np.ndarray) else a)
        b = np.asarray(longer.array)
        if (
            not a.ndim
            or b.ndim != a.ndim
            or a.shape[1:] != b.shape[1:]
            or not (a == a[:1]).all()
            or not (b == a[:1]).all()
        ):
            raise OperatorError(f"a constant of shape {a.shape} depends on the batch; export without dynamic_batch")
        name, first, _ = self._batch()
        factor, rest = divmod(len(a), first)
        if rest or len(b) * first != len(a) * (first + 1):
            raise OperatorError(f"a constant of shape {a.shape} depends on the batch; export without dynamic_batch")
        count = self.graph.op("Mul", name, self.graph.ints([factor])) if factor != 1 else name
        shape = self.graph.op("Concat", count, self.graph.ints(a.shape[1:]), axis=0)
        return self.graph.op("Expand", self.graph.constant(a[:1].copy()), shape)

    def _batch(self) -> tuple[str, int, int]:
        """The name of the batch's size in the graph, and the sizes of both passes."""
        if not self._batch_name:
            shape = self.graph.op("Shape", self.inputs[0])
            self._batch_name = self.graph.op("Gather", shape, self.graph.ints([0]), axis=0)
        return self._batch_name, len(self.first.arrays[0]), len(self.longer.arrays[0])

    def declared(self, shape: tuple[int, ...]) -> list[Any]:
        """The shape of an input, whose first length may be open."""
        return ["batch", *shape[1:]] if self.dynamic else list(shape)

    def outputs(self, names: list[str]) -> list[tuple[str, Any, Any]]:
        """Give the outputs their names; their types and shapes."""
        found = []
        self.graph.layer = ""
        passes = (self.first, self.second, self.longer)
        nothing = TracedCall("output", None, (), (), "")
        for name, *arrays in zip(names, *(p.outputs for p in passes)):
            sources = [p.trace.source(a) for p, a in zip(passes, arrays)]
            try:
                inner = self._name(*sources, nothing)
            except OperatorError as error:
                raise OperatorError(f"onnx.export: output {name}: {error}") from None
            self.graph.nodes.append(self.graph.onnx.helper.make_node("Identity", [inner], [name], name=f"node.{name}"))
            shape: list[Any] = list(arrays[0].shape)
            if self.dynamic:
                shape = [n if n == m else "batch" for n, m in zip(shape, arrays[2].shape)]
            found.append((name, arrays[0].dtype, shape))
        return found


def _attribute(name: str) -> Any:
    return lambda call: getattr(call.node, name, None)


def _index_part(k: int) -> Any:
    def find(call: TracedCall) -> Any:
        slices = getattr(call.node, "slices", None)
        return slices[k] if isinstance(slices, tuple) and k < len(slices) else None

    return find


# Where nodes keep arrays that may depend on inputs: conditions, indexes, labels.
_PLACES = (
    _attribute("condition"), _attribute("slices"), _attribute("t"), _attribute("q"), _attribute("order"),
    lambda call: call.given[0] if isinstance(call.given, tuple) and call.given else None,
    *map(_index_part, range(6)),
)  # fmt: skip


def _require_same_calls(first: CallTrace, other: CallTrace) -> None:
    kinds = [[(c.kind, c.layer) for c in trace.calls] for trace in (first, other)]
    if kinds[0] != kinds[1]:
        k = next((k for k, (a, b) in enumerate(zip(*kinds)) if a != b), min(map(len, kinds)))
        kind, layer = kinds[0][k] if k < len(kinds[0]) else kinds[1][k]
        raise OperatorError(
            f"onnx.export: the model calls other functions for other values (first at {kind} in layer {layer or '/'}); "
            "an ONNX graph has no such control flow"
        )


def _require_same_settings(call: TracedCall, second: TracedCall) -> None:
    """Numbers that a node was made with must not depend on the values of the inputs."""
    for name, value in call.settings.items():
        other = second.settings.get(name)
        if value != other and value == value:
            raise OperatorError(
                f"{name} is {value!r} for these inputs and {other!r} for others; it would be a constant"
            )
    for y, other in zip(call.ys, second.ys):
        shape, wanted = np.shape(y), np.shape(other)
        if shape != wanted:
            words = f"the shape of a result is {shape} for these inputs and {wanted} for others"
            raise OperatorError(f"{words}; it would be a constant")


def _is_equal(a: Any, other: Any, dtype: DTypeLike) -> bool:
    if other is a:
        return True
    b = other if isinstance(other, np.ndarray) else np.asarray(other, dtype)
    return bool(a.shape == b.shape and a.dtype == b.dtype and (a.tobytes() == b.tobytes()))


# ---- the file -------------------------------------------------------------------------------------------------------


def _names(letter: str, what: str, given: list[str] | None, num: int) -> list[str]:
    if given is None:
        return [letter] if num == 1 else [f"{letter}{i}" for i in range(num)]
    if len(given) != num or len(set(given)) != num:
        raise ValueError(f"onnx.export: {what}: expected {num} different names, got {given!r}")
    return list(given)


def _compare(data: bytes, names: list[str], tried: _Pass) -> None:
    """Run the file with onnxruntime, if that is installed, and compare the results with the model's."""
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    results = session.run(None, dict(zip(names, tried.arrays)))
    for place, (y, wanted) in enumerate(zip(results, tried.outputs)):
        y, wanted = np.asarray(y), np.asarray(wanted)
        if y.shape != wanted.shape:
            raise OperatorError(f"onnx.export: output {place}: onnxruntime gives shape {y.shape}, not {wanted.shape}")
        if not y.size or wanted.dtype.kind not in "f":
            continue
        scale = max(float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)), 1.0)
        width = float(np.finfo(wanted.dtype).eps) / float(np.finfo(np.float32).eps)
        if not np.allclose(y, wanted, rtol=0, atol=_TOLERANCE * scale * max(width, 1.0), equal_nan=True):
            error = float(np.nanmax(np.abs(y.astype(float) - wanted)))
            raise OperatorError(f"onnx.export: output {place}: onnxruntime differs from the model by {error:.2g}")
