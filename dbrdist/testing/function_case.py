"""Tests of a function: its values, its gradient and the gradient of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import DeviceSpec, is_floating, to_cpu
from dbrdist.core.array.types import Array
from dbrdist.core.tape.gradient_check import check_backward, check_double_backward
from dbrdist.testing.backend import BackendConfig
from dbrdist.testing.checked import CheckedCase, cast_options, with_gradient

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable


class FunctionTestError(AssertionError):
    """The function under test is wrong; the message says what differs."""


class FunctionTestCase(CheckedCase):
    """The base of test cases of functions: ``test_forward``, ``test_backward`` and ``test_double_backward``.

    A test case defines ``generate_inputs()`` (a tuple of NumPy arrays), ``forward(inputs, device)`` (Variables to a
    tuple of Variables) and ``forward_expected(inputs)`` (NumPy arrays to a tuple of NumPy arrays). It may define
    ``before_test(test_name)``, ``generate_grad_outputs(outputs_template)``,
    ``generate_grad_grad_inputs(inputs_template)`` and ``check_forward_outputs(outputs, expected_outputs)``.

    Attributes: ``skip_forward_test``, ``skip_backward_test``, ``skip_double_backward_test``;
    ``check_forward_options`` (of :func:`assert_allclose`), ``check_backward_options`` and
    ``check_double_backward_options`` (of :mod:`dbrdist.gradient_check`); ``dodge_nondifferentiable`` draws other
    inputs where the function has a kink; ``contiguous`` ('C', or None: arrays with gaps).

    Use it with :func:`inject_backend_tests`; without, it runs on the CPU. Example:

        @testing.inject_backend_tests(None, [{}, {"use_cuda": True}])
        class TestReLU(testing.FunctionTestCase):
            dodge_nondifferentiable = True

            def generate_inputs(self):
                return (numpy.random.uniform(-1, 1, (2, 3)).astype("float32"),)

            def forward(self, inputs, device):
                return (F.relu(inputs[0]),)

            def forward_expected(self, inputs):
                return (numpy.maximum(inputs[0], 0),)

    Args:
        args: those of :class:`unittest.TestCase`; a test runner passes them.
        kwargs: the same by name.
    """

    error = FunctionTestError
    options = ("check_forward_options", "check_backward_options", "check_double_backward_options")
    check_forward_options: dict[str, Any] | None = None
    check_backward_options: dict[str, Any] | None = None
    check_double_backward_options: dict[str, Any] | None = None
    skip_forward_test = False
    skip_backward_test = False
    skip_double_backward_test = False

    def forward(self, inputs: tuple[Any, ...], device: DeviceSpec | None) -> tuple[Any, ...]:
        """The function under test: its outputs, as a tuple of Variables, for the Variables ``inputs`` on ``device``."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward(inputs, device)")

    def forward_expected(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs, as a tuple of NumPy arrays, that are expected for the NumPy arrays ``inputs``."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward_expected(inputs)")

    def generate_grad_grad_inputs(self, inputs_template: tuple[Array, ...]) -> tuple[Array, ...]:
        """The gradients of the inputs' gradients, shaped as ``inputs_template``: uniform in -1 to 1."""
        return self.generate_grad_outputs.__func__(self, inputs_template)  # type: ignore[attr-defined,no-any-return]

    def _forward(self, inputs: tuple[Variable, ...], config: BackendConfig) -> tuple[Variable, ...]:
        with config:
            return self.checked_outputs(self.forward(inputs, config.device), config)

    def test_forward(self, backend_config: BackendConfig | None = None) -> None:
        """The outputs are those expected and inputs stay, on the device of ``backend_config`` (None: the CPU)."""
        if self._is_base():
            return
        config = self.begin("test_forward", backend_config)
        arrays = self.numpy_arrays("generate_inputs")
        kept = [a.copy() for a in arrays]
        expected = self.numpy_arrays("forward_expected", tuple(a.copy() for a in arrays))
        xs = self.placed(arrays, config)
        outputs = self._forward(tuple(with_gradient(x) for x in xs), config)
        changed = [str(i) for i, (x, k) in enumerate(zip(xs, kept)) if not _are_same(to_cpu(x), k)]
        if changed:
            raise FunctionTestError(f"forward changed its inputs: {', '.join(changed)}")
        self.check_forward_outputs(tuple(y.array for y in outputs), expected)

    def test_backward(self, backend_config: BackendConfig | None = None) -> None:
        """The gradient agrees with differences, on the device of ``backend_config`` (None: the CPU)."""
        if self._is_base():
            return
        config = self.begin("test_backward", backend_config)

        def check() -> None:
            inputs = self.numpy_arrays("generate_inputs")
            gys = self.numpy_arrays("generate_grad_outputs", self.numpy_arrays("forward_expected", inputs))
            self._check(check_backward, "backward", self.check_backward_options, config, inputs, gys)

        self.dodging(check)

    def test_double_backward(self, backend_config: BackendConfig | None = None) -> None:
        """The gradient of the gradient agrees with differences, on the device of ``backend_config`` (None: the CPU)."""
        if self._is_base():
            return
        config = self.begin("test_double_backward", backend_config)

        def check() -> None:
            inputs = self.numpy_arrays("generate_inputs")
            gys = self.numpy_arrays("generate_grad_outputs", self.numpy_arrays("forward_expected", inputs))
            ggxs = self.numpy_arrays("generate_grad_grad_inputs", inputs)
            ggxs = tuple(g for g, x in zip(ggxs, inputs, strict=True) if is_floating(x.dtype))
            options = self.check_double_backward_options
            self._check(check_double_backward, "double backward", options, config, inputs, gys, ggxs)

        self.dodging(check)

    def _check(self, check: Any, name: str, options: Any, config: BackendConfig, *arrays: tuple[Array, ...]) -> None:
        try:
            check(
                lambda *xs: self._forward(xs, config),
                *(self.placed(a, config) for a in arrays),
                detect_nondifferentiable=self.dodge_nondifferentiable,
                **cast_options(options),
            )
        except FunctionTestError:
            raise
        except AssertionError as error:
            raise FunctionTestError(f"{name} is wrong: {error}") from error

    def _is_base(self) -> bool:
        """Whether it is this class itself, which a runner collects where a test file imports it by name."""
        return type(self) is FunctionTestCase


def _are_same(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=is_floating(a.dtype))
