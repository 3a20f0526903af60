"""Tests of a link: its values, its gradients and how its parameters are initialised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import DeviceSpec, to_cpu
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.tape.gradient_check import check_backward
from dbrdist.core.tape.variable import Variable
from dbrdist.links.initializers import Initializer, generate_array, get_initializer
from dbrdist.testing.backend import BackendConfig
from dbrdist.testing.checked import CheckedCase, cast_options, with_gradient

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Parameter


class LinkTestError(AssertionError):
    """The link under test is wrong; the message says what differs."""


class InitializerArgument:
    """An argument of a link that is no initializer itself, such as None, with the initializer that it stands for.

    Args:
        argument_value: the argument of the link, such as None.
        expected_initializer: the initializer that it stands for.
    """

    def __init__(self, argument_value: int | None, expected_initializer: int | str | None) -> None:
        _check_is_initializer("expected_initializer", expected_initializer)
        self.argument_value = argument_value
        self.expected_initializer = expected_initializer


def _check_is_initializer(name: str, value: Any) -> None:
    if not (callable(value) or isinstance(value, (int, float, np.ndarray, np.generic))):
        hint = "; wrap None into an InitializerArgument" if value is None else ""
        raise (ValueError if value is None else TypeError)(
            f"{name}: expected an initializer, a number or an array, got {value!r}{hint}"
        )


def _argument(init: Any) -> Array | Initializer | int | None:
    return init.argument_value if isinstance(init, InitializerArgument) else init


def _expected(init: Any) -> Array | Initializer | int | None:
    return init.expected_initializer if isinstance(init, InitializerArgument) else init


class _LinkCase(CheckedCase):
    """What a test case of links defines."""

    error = LinkTestError
    param_names: tuple[str, ...] | list[str] = ()

    def generate_params(self) -> Any:
        """One initializer for each argument that is one."""
        raise NotImplementedError(f"{type(self).__name__} defines no generate_params()")

    def create_link(self, initializers: Any) -> Link:
        """The link with these ``initializers``, in the order of ``param_names``."""
        raise NotImplementedError(f"{type(self).__name__} defines no create_link(initializers)")

    def forward(self, link: Link, inputs: tuple[Variable, ...], device: DeviceSpec) -> tuple[Any, ...]:
        """The outputs of ``link`` for the Variables ``inputs`` on ``device``, as a tuple of Variables."""
        outputs = link(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _params(self) -> list[Array]:
        inits = self.generate_params()
        if not isinstance(inits, (tuple, list)):
            raise TypeError(f"generate_params(): expected a tuple of initializers, got {type(inits).__name__}")
        for init in inits:
            _check_is_initializer("generate_params()", _expected(init))
        return list(inits)

    def _link(self, inits: list[Any], config: BackendConfig) -> Link:
        link = self.create_link(tuple(_argument(i) for i in inits))
        if not isinstance(link, Link):
            raise TypeError(f"create_link(): expected a Link, got {type(link).__name__}")
        return link.to_device(config.device)

    def _forward(self, link: Link, inputs: tuple[Variable, ...], config: BackendConfig) -> tuple[Variable, ...]:
        with config:
            return self.checked_outputs(self.forward(link, inputs, config.device), config)

    def _parameter(self, link: Link, name: str) -> Parameter:
        found = getattr(link, name, None)
        if found is None:
            names = ", ".join(n.lstrip("/") for n, _ in link.namedparams()) or "none"
            raise LinkTestError(f"expected the link to have a parameter named {name!r}; its parameters: {names}")
        return found


class LinkTestCase(_LinkCase):
    """The base of test cases of links: ``test_forward`` and ``test_backward``.

    A test case defines ``generate_params()`` (a tuple of initializers), ``create_link(initializers)``,
    ``generate_inputs()`` (a tuple of NumPy arrays), ``forward_expected(link, inputs)`` (NumPy arrays to a tuple of
    NumPy arrays, with the link on the CPU) and ``param_names``, the parameters whose gradients are checked. It may
    define ``forward(link, inputs, device)``, ``before_test(test_name)``, ``generate_grad_outputs(outputs_template)``
    and ``check_forward_outputs(outputs, expected_outputs)``. Attributes as of :class:`FunctionTestCase`.

    Args:
        args: those of :class:`unittest.TestCase`; a test runner passes them.
        kwargs: the same by name.
    """

    options = ("check_forward_options", "check_backward_options")
    check_forward_options: dict[str, Any] | None = None
    check_backward_options: dict[str, Any] | None = None
    skip_forward_test = False
    skip_backward_test = False

    def forward_expected(self, link: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs, as a tuple of NumPy arrays, that are expected of ``link`` for the NumPy arrays ``inputs``."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward_expected(link, inputs)")

    def test_forward(self, backend_config: BackendConfig | None = None) -> None:
        """The outputs are those expected, on the device of ``backend_config`` (None: the CPU)."""
        if type(self) is LinkTestCase:
            return
        config = self.begin("test_forward", backend_config)
        link = self._link(self._params(), config)
        inputs = self.numpy_arrays("generate_inputs")
        outputs = self._forward(link, tuple(with_gradient(x) for x in self.placed(inputs, config)), config)
        arrays = tuple(y.array for y in outputs)
        link.to_device("@numpy")
        self.check_forward_outputs(arrays, self.numpy_arrays("forward_expected", link, inputs))

    def test_backward(self, backend_config: BackendConfig | None = None) -> None:
        """All gradients agree with differences, on the device of ``backend_config`` (None: the CPU)."""
        if type(self) is LinkTestCase:
            return
        config = self.begin("test_backward", backend_config)
        self.dodging(lambda: self._check_backward(config))

    def _check_backward(self, config: BackendConfig) -> None:
        link = self._link(self._params(), config)
        inputs = self.placed(self.numpy_arrays("generate_inputs"), config)
        outputs = self._forward(link, tuple(with_gradient(x) for x in inputs), config)
        gys = self.numpy_arrays("generate_grad_outputs", tuple(to_cpu(y.array) for y in outputs))
        params = [self._parameter(link, name) for name in self.param_names]
        options = cast_options(self.check_backward_options or {})
        for p in link.params():  # also those that are not checked: no mixture of types
            p.array = p.array.astype(options["dtype"] or p.dtype)
        try:
            check_backward(
                lambda *xs: self._forward(link, xs, config),
                inputs,
                self.placed(gys, config),
                params,
                detect_nondifferentiable=self.dodge_nondifferentiable,
                **options,
            )
        except LinkTestError:
            raise
        except AssertionError as error:
            raise LinkTestError(f"backward is wrong: {error}") from error


class LinkInitializersTestCase(_LinkCase):
    """The base of test cases of links' initializers: ``test_initializers``.

    A test case defines ``generate_params()``, ``create_link(initializers)`` and ``generate_inputs()`` as for
    :class:`LinkTestCase`, ``param_names`` in the order of the initializers, and ``get_initializers()``: for each
    initializer a list of values to try (deterministic initializers, numbers, arrays, :class:`InitializerArgument`).
    ``check_initializers_options`` goes to :func:`assert_allclose`.

    Args:
        args: those of :class:`unittest.TestCase`; a test runner passes them.
        kwargs: the same by name.
    """

    options = ("check_initializers_options",)
    check_initializers_options: dict[str, Any] | None = None

    def get_initializers(self) -> Any:
        """For each initializer, what is to be tried."""
        raise NotImplementedError(f"{type(self).__name__} defines no get_initializers()")

    def test_initializers(self, backend_config: BackendConfig | None = None) -> None:
        """Each parameter is as its initializer fills it, on the device of ``backend_config`` (None: the CPU)."""
        if type(self) is LinkInitializersTestCase:
            return
        config = self.begin("test_initializers", backend_config)
        tried = self.get_initializers()
        if not isinstance(tried, (tuple, list)) or not all(isinstance(t, (tuple, list)) for t in tried):
            raise TypeError(f"get_initializers(): expected a list of initializers for each, got {tried!r}")
        if len(tried) > len(self.param_names):
            raise ValueError(f"param_names: expected {len(tried)} as of get_initializers(), got {self.param_names!r}")
        for i, values in enumerate(tried):
            for init in values:
                _check_is_initializer("get_initializers()", _expected(init))
                self._check_initializer(i, init, config)

    def _check_initializer(self, i: int, init: Any, config: BackendConfig) -> None:
        inits = self._params()
        inits[i] = init
        link = self._link(inits, config)
        inputs = self.placed(self.numpy_arrays("generate_inputs"), config)
        self._forward(link, tuple(with_gradient(x) for x in inputs), config)  # gives late parameters their shapes
        name = self.param_names[i]
        found = to_cpu(self._parameter(link, name).array)
        expected = generate_array(get_initializer(_expected(init)), found.shape, np, found.dtype)
        what = f"parameter {name} with the initializer {_argument(init)!r}"
        self.compare(what, [found], [expected], self.check_initializers_options or {})
