"""What the test cases of functions and links share."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import get_array_module, is_floating
from dbrdist.core.array.types import Array
from dbrdist.core.tape.gradient_check import NondifferentiableError, assert_allclose
from dbrdist.core.tape.variable import Variable
from dbrdist.testing.backend import BackendConfig

_MOST_DRAWS = 100  # of inputs for one that is no kink


class CheckedCase(unittest.TestCase):
    """The base of :class:`FunctionTestCase`, :class:`LinkTestCase` and :class:`LinkInitializersTestCase`."""

    error: type[AssertionError] = AssertionError
    backend_config: BackendConfig | None = None
    contiguous: str | None = None
    dodge_nondifferentiable = False
    options: tuple[str, ...] = ()  # attributes that each instance has a dictionary of its own for

    def __init__(self, *args: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.options:
            setattr(self, name, dict(getattr(self, name) or {}))

    def before_test(self, test_name: str) -> None:
        """Called before the test ``test_name``; raise unittest.SkipTest to skip it."""

    def generate_inputs(self) -> tuple[Any, ...]:
        """The inputs, as NumPy arrays."""
        raise NotImplementedError(f"{type(self).__name__} defines no generate_inputs()")

    def generate_grad_outputs(self, outputs_template: tuple[Array, ...]) -> tuple[Array, ...]:
        """The gradients that arrive at the outputs, shaped as ``outputs_template``: uniform in -1 to 1."""
        return tuple(np.random.uniform(-1, 1, a.shape).astype(a.dtype) for a in outputs_template)

    def begin(self, test_name: str, config: BackendConfig | None) -> BackendConfig:
        """Start the test ``test_name`` on the device of ``config`` (None: the CPU)."""
        if getattr(self, f"skip_{test_name.removeprefix('test_')}_test", False):
            raise unittest.SkipTest(f"skip_{test_name.removeprefix('test_')}_test is set")
        self.backend_config = config = BackendConfig({}) if config is None else config
        self.before_test(test_name)
        return config

    def numpy_arrays(self, name: str, *args: Any) -> tuple[Array, ...]:
        """What the method ``name`` returns for ``args``: a tuple of NumPy arrays; otherwise the test itself is wrong.

        Among gradients there may be None: none arrives there.
        """
        arrays = getattr(self, name)(*args)
        types = (np.ndarray, np.generic, type(None)) if name.startswith("generate_grad") else (np.ndarray, np.generic)
        if not isinstance(arrays, tuple) or not all(isinstance(a, types) for a in arrays):
            got = ", ".join(type(a).__name__ for a in arrays) if isinstance(arrays, tuple) else type(arrays).__name__
            raise TypeError(f"{name}(): expected a tuple of NumPy arrays, got {got}")
        return tuple(None if a is None else np.asarray(a) for a in arrays)

    def placed(self, arrays: tuple[Array, ...], config: BackendConfig) -> tuple[Array, ...] | None:
        """The ``arrays`` on the device of ``config``; with gaps between elements unless ``contiguous`` is 'C'."""
        if self.contiguous not in (None, "C"):
            raise ValueError(f"contiguous: expected None or 'C', got {self.contiguous!r}")
        sent = config.get_array(tuple(arrays))
        return sent if self.contiguous == "C" else tuple(None if a is None else _with_gaps(a) for a in sent)

    def checked_outputs(self, outputs: Any, config: BackendConfig) -> tuple[Variable, ...]:
        """The ``outputs`` of forward, which must be a tuple of Variables on the device of ``config``."""
        if not isinstance(outputs, tuple):
            raise self.error(f"forward(): expected a tuple of Variables, got {type(outputs).__name__}")
        for i, y in enumerate(outputs):
            if not isinstance(y, Variable):
                raise self.error(f"forward(): expected a tuple of Variables, got {type(y).__name__} as output {i}")
            if get_array_module(y) is not config.xp:
                raise self.error(f"forward(): expected output {i} on {config.device}, got {type(y.array)}")
        return outputs

    def check_forward_outputs(self, outputs: tuple[Array, ...], expected_outputs: tuple[Array, ...]) -> None:
        """Compare ``outputs`` with ``expected_outputs``, by ``assert_allclose`` with ``check_forward_options``."""
        self.compare("output", outputs, expected_outputs, self.check_forward_options)  # type: ignore[attr-defined]

    def compare(self, what: str, actual: Sequence[Array], expected: Sequence[Array], options: dict[str, Any]) -> None:
        """Raise ``error`` where number, shapes, dtypes or values differ.

        Args:
            what: the noun of the message, such as ``"output"``.
            actual, expected: the arrays.
            options: for ``assert_allclose``: ``atol``, ``rtol``.
        """
        if len(actual) != len(expected):
            raise self.error(f"expected {len(expected)} {what}s, got {len(actual)}: {_described(actual)}")
        differing = []
        for i, (a, e) in enumerate(zip(actual, expected)):
            if (a.shape, a.dtype) != (e.shape, e.dtype):
                differing.append(f"{what} {i}: expected {_described([e])}, got {_described([a])}")
                continue
            try:
                assert_allclose(a, e, **options)
            except AssertionError as error:
                differing.append(f"{what} {i}, {_described([e])}: values differ from the expected ones{error}")
        if differing:
            raise self.error("\n".join(differing))

    def dodging(self, check: Callable[[], None]) -> None:
        """Run ``check``; with ``dodge_nondifferentiable`` again until the inputs are at no kink."""
        for _ in range(_MOST_DRAWS if self.dodge_nondifferentiable else 1):
            try:
                return check()
            except NondifferentiableError as error:
                last = error
        raise self.error(f"expected inputs without kinks among {_MOST_DRAWS} draws of them: {last}") from last


def cast_options(options: dict[str, float]) -> dict[str, Any]:
    """Options of a gradient check, in float64 unless they say otherwise."""
    return {"dtype": np.float64, **options}


def with_gradient(x: Array) -> Variable:
    """An input as a Variable, which takes a gradient if it is floating."""
    return Variable(x, requires_grad=is_floating(x.dtype))


def _with_gaps(a: Any) -> Any:
    """The same values with gaps between the elements along the last axis."""
    if not a.ndim:
        return a
    wide = get_array_module(a).zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
    wide[..., ::2] = a
    return wide[..., ::2]


def _described(arrays: Sequence[Array]) -> str:
    return ", ".join(f"shape {a.shape} and dtype {a.dtype}" for a in arrays) or "none"
