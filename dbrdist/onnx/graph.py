"""An ONNX graph that is being written: values by name, constants, operators."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

OPSET = 18
_IR_VERSION = 9  # of ONNX 1.14, which brought opset 18's successors: older runtimes read it


def library() -> Any:
    """The package ``onnx``; an ImportError says how to get it."""
    try:
        found = importlib.import_module("onnx")
        importlib.import_module("onnx.helper")
        importlib.import_module("onnx.numpy_helper")
    except ImportError as e:
        raise ImportError("ONNX files need the package onnx: pip install 'dbrdist[onnx]'") from e
    return found


class OnnxGraph:
    """Operators in order, with the constants that they read. Names of values are unique."""

    def __init__(self, parameter_names: dict[int, str]) -> None:
        self.onnx = library()
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.layer = ""
        self._parameter_names = parameter_names
        self._constants: dict[Any, str] = {}
        self._names: set[str] = set()

    # ---- names ------------------------------------------------------------------------------------------------------

    def new_name(self, wanted: str) -> str:
        """A name that nothing else has."""
        name, k = wanted, 1
        while name in self._names:
            name, k = f"{wanted}_{k}", k + 1
        self._names.add(name)
        return name

    def _value_name(self, op: str) -> str:
        layer = self.layer.strip("/").replace("/", ".")
        return self.new_name(f"{layer}.{op}" if layer else op)

    # ---- constants --------------------------------------------------------------------------------------------------

    def constant(self, array: Any) -> str:
        """The name of an array that the file contains: a parameter under its path, anything else by its contents."""
        a = np.asarray(array)
        path = self._parameter_names.get(id(array))
        key: Any = (id(array), "parameter") if path else (a.dtype.str, a.shape, a.tobytes())
        if key not in self._constants:
            name = self.new_name(path or "constant")
            self._constants[key] = name
            self.initializers[name] = a
        return self._constants[key]

    def ints(self, values: Any) -> str:
        """A vector of int64."""
        return self.constant(np.asarray(list(values), np.int64))

    def number(self, value: Any, dtype: DTypeLike) -> str:
        """A number of a type."""
        return self.constant(np.asarray(value, dtype))

    # ---- operators --------------------------------------------------------------------------------------------------

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output; returns the output's name."""
        return self.ops(kind, inputs, 1, **attributes)[0]

    def ops(self, kind: str, inputs: Any, num_outputs: int, **attributes: Any) -> list[str]:
        """Add an operator; returns the names of its outputs."""
        outputs = [self._value_name(kind) for _ in range(num_outputs)]
        node = self.onnx.helper.make_node(
            kind, list(inputs), outputs, name=self.new_name(f"node.{outputs[0]}"), **attributes
        )
        if self.layer:
            node.doc_string = f"layer {self.layer}"
        self.nodes.append(node)
        return outputs

    # ---- common pieces ----------------------------------------------------------------------------------------------

    def reshape(self, x: str, shape: Any) -> str:
        """x in another shape."""
        return self.op("Reshape", x, self.ints(shape), allowzero=1)

    def sum(self, x: str, axes: Any, keepdims: bool) -> str:
        """x summed over axes; nothing is done without axes."""
        axes = list(axes)
        return self.op("ReduceSum", x, self.ints(axes), keepdims=int(keepdims)) if axes else x

    def mean(self, x: str, axes: Any, keepdims: bool) -> str:
        """The mean of x over axes."""
        axes = list(axes)
        return self.op("ReduceMean", x, self.ints(axes), keepdims=int(keepdims)) if axes else x

    def part(self, x: str, axis: int, start: int, stop: int, step: int = 1) -> str:
        """x[start:stop:step] along an axis; the bounds are ONNX's, so that -2^31 ends a walk to the first element."""
        return self.op("Slice", x, *(self.ints([v]) for v in (start, stop, axis, step)))

    def take(self, x: str, axis: int, indexes: Any) -> str:
        """The elements of x at places along an axis; a number removes the axis."""
        return self.op("Gather", x, self.constant(np.asarray(indexes, np.int64)), axis=axis)

    def cast(self, x: str, dtype: DTypeLike) -> str:
        """x in another type."""
        return self.op("Cast", x, to=self.type_of(dtype))

    def type_of(self, dtype: DTypeLike) -> int:
        """ONNX's number of a type."""
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    # ---- the file ---------------------------------------------------------------------------------------------------

    def model(self, inputs: Any, outputs: Any, metadata: dict[str, str], opset: int, version: str) -> Any:
        """The finished model; ``inputs`` and ``outputs`` are triples of a name, a type and a shape."""
        helper = self.onnx.helper

        def declared(values: Any) -> list[Any]:
            return [helper.make_tensor_value_info(name, self.type_of(dtype), shape) for name, dtype, shape in values]

        tensors = [self.onnx.numpy_helper.from_array(np.ascontiguousarray(a).reshape(a.shape), name)
                   for name, a in self.initializers.items()]  # fmt: skip
        graph = helper.make_graph(self.nodes, "dbrdist", declared(inputs), declared(outputs), tensors)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR_VERSION,
            producer_name="dbrdist", producer_version=version,
        )  # fmt: skip
        helper.set_model_props(model, metadata)
        return model
