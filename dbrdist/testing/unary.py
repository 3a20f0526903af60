"""Tests of elementwise functions of one argument."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.types import Array
from dbrdist.core.tape.gradient_check import assert_allclose, check_backward, check_double_backward
from dbrdist.core.tape.variable import Variable
from dbrdist.testing import attr
from dbrdist.testing.backend import BackendConfig
from dbrdist.testing.bundle import Bundle
from dbrdist.testing.parameterized import parameterize, product

_DEVICES = {"cpu": (BackendConfig({}), lambda test: test), "gpu": (BackendConfig({"use_cuda": True}), attr.gpu)}


def _make_data(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, Array, Array]:
    x, gy, ggx = (np.random.uniform(-1, 1, shape).astype(dtype) for _ in range(3))
    return x, gy, ggx


def _tolerances(dtype: DTypeLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for values and for gradients; values in float16 may differ by one unit in the last place."""
    if dtype == np.float16:
        return {"atol": 1e-3, "rtol": 1e-3}, {"dtype": np.float64, "eps": 2**-4, "atol": 2**-4, "rtol": 2**-4}
    return {"atol": 1e-4, "rtol": 1e-4}, {"dtype": np.float64, "atol": 1e-4, "rtol": 1e-4}


def unary_math_function_unittest(
    func: Callable[..., Any],
    func_expected: Callable[..., Any] | None = None,
    label_expected: str | None = None,
    make_data: Callable[..., tuple[Any, ...]] | None = None,
    is_linear: bool | None = None,
    forward_options: dict[str, int] | None = None,
    backward_options: dict[str, Any] | None = None,
    double_backward_options: dict[str, Any] | None = None,
) -> Callable[[type], Bundle]:
    """A decorator that fills a test class with the tests of an elementwise function.

    Values, gradient and the gradient's gradient are tested with shapes (3, 2) and () in float16, float32 and float64,
    on the CPU and, where there is one, the GPU.

    Args:
        func: the function of one Variable.
        func_expected: the same in NumPy, called with ``(x, dtype=...)``; NumPy's function of that name if None.
        label_expected: the label of the function in graphs, if it is to be tested.
        make_data: called with (shape, dtype), returns input, gradient and second gradient; uniform in -1 to 1 if None.
        is_linear: tests the second gradient of the square instead, for functions that have none.
        forward_options: of :func:`assert_allclose`, instead of those by type.
        backward_options, double_backward_options: of :mod:`dbrdist.gradient_check`, likewise.
    """
    name = getattr(func, "__name__", type(func).__name__.lower())
    if func_expected is None:
        func_expected = getattr(np, name, None)
        if func_expected is None:
            raise ValueError(f"func_expected is required: NumPy has no function named {name!r}")
    reference = func_expected

    def squared(x: Variable) -> Any:
        y = func(x)
        return y * y

    def set_up(self: Any) -> None:
        self.x, self.gy, self.ggx = (make_data or _make_data)(self.shape, self.dtype)
        values, gradients = _tolerances(self.dtype)
        self.forward_options = {**values, **(forward_options or {})}
        self.backward_options = {**gradients, **(backward_options or {})}
        self.double_backward_options = {**gradients, **(double_backward_options or {})}

    def forward(self: Any, config: BackendConfig) -> None:
        y = func(Variable(config.get_array(self.x)))
        self.assertEqual(y.dtype, self.x.dtype)
        assert_allclose(y.array, reference(self.x, dtype=self.x.dtype), **self.forward_options)

    def backward(self: Any, config: BackendConfig) -> None:
        check_backward(func, *config.get_array((self.x, self.gy)), **self.backward_options)

    def double_backward(self: Any, config: BackendConfig) -> None:
        arrays = config.get_array((self.x, self.gy, self.ggx))
        check_double_backward(squared if is_linear else func, *arrays, **self.double_backward_options)

    def label(self: Any) -> None:
        self.assertEqual(func(Variable(self.x)).creator.label, label_expected)

    def decorate(case: type) -> Bundle:
        if not issubclass(case, unittest.TestCase):
            raise TypeError(f"expected a class that inherits from unittest.TestCase, got {case!r}")
        case.setUp = set_up
        for test in (forward, backward, double_backward):
            for place, (config, needs) in _DEVICES.items():
                setattr(case, f"test_{test.__name__}_{place}", needs(_on(test, config)))
        if label_expected is not None:
            case.test_label = label  # type: ignore[attr-defined]
        return parameterize(*product({"shape": [(3, 2), ()], "dtype": [np.float16, np.float32, np.float64]}))(case)

    return decorate


def _on(test: Callable[..., None], config: BackendConfig) -> Callable[[Any], None]:
    def on(self: Any) -> None:
        test(self, config)

    return on
