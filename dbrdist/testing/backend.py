"""Test methods for each configuration of the backend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from dbrdist.core.array.backend import Device, get_device
from dbrdist.core.array.config import using_config
from dbrdist.core.array.types import Array
from dbrdist.testing import attr
from dbrdist.testing.bundle import classes_of

_SWITCHES: dict[str, Any] = {
    "use_cudnn": "never",
    "cudnn_deterministic": False,
    "autotune": False,
    "use_ideep": "never",
    "cudnn_fast_batch_normalization": False,
}
_PROPERTIES: dict[str, Any] = {
    "use_cuda": False,
    "cuda_device": None,
    **_SWITCHES,
    "use_chainerx": False,
    "chainerx_device": None,
}


class BackendConfig:
    """A device and the switches of a test; within ``with config:`` the switches are those of the configuration.

    Args:
        params: some of ``use_cuda``, ``cuda_device``, ``use_cudnn``, ``cudnn_deterministic``, ``autotune``,
            ``use_ideep``, ``cudnn_fast_batch_normalization``, ``use_chainerx`` and ``chainerx_device``, with their
            values.

    Raises:
        TypeError, ValueError: ``params`` is no dictionary, or has another name.

    Example:
        >>> config = dbrdist.testing.BackendConfig({"use_cuda": False})
        >>> config.xp.__name__
        'numpy'
    """

    def __init__(self, params: dict[str, Any]) -> None:
        if not isinstance(params, dict):
            raise TypeError(f"params: expected a dictionary, got {params!r}")
        for name in params:
            if name not in _PROPERTIES:
                raise ValueError(f"params: expected some of {', '.join(_PROPERTIES)}, got {name!r}")
        self.__dict__.update({**_PROPERTIES, **params})
        if self.use_cuda and self.cuda_device is None:
            self.cuda_device = 0
        self._contexts = ExitStack()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a BackendConfig has no {name!r}; it has {', '.join(_PROPERTIES)}")

    @property
    def xp(self) -> Any:
        """numpy, or cupy where ``use_cuda`` is set."""
        return self.device.xp

    @property
    def device(self) -> Device:
        """The device of the arrays."""
        if self.use_chainerx:
            raise ValueError("expected a device of NumPy or CuPy; dbrdist has no ChainerX")
        return get_device(f"@cupy:{self.cuda_device}" if self.use_cuda else "@numpy")

    def get_array(self, array: Array | Sequence[Array | None] | None) -> Any:
        """``array`` (an array, or a tuple or list of arrays) on the device; None stays None."""
        if isinstance(array, (tuple, list)):
            return type(array)(self.get_array(a) for a in array)
        return None if array is None else self.device.send(array)

    def __enter__(self) -> BackendConfig:
        for name in _SWITCHES:
            self._contexts.enter_context(using_config(name, getattr(self, name)))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._contexts.close()

    def __repr__(self) -> str:
        return f"<BackendConfig {' '.join(f'{name}={getattr(self, name)!r}' for name in _PROPERTIES)}>"

    def get_func_str(self) -> str:
        """The configuration as a part of a method's name: what differs from the default."""
        changed = [n for n, default in _PROPERTIES.items() if getattr(self, n) != default]
        return "__".join(f"{n}_{str(getattr(self, n)).lower()}" for n in changed) or "cpu"

    def get_pytest_marks(self) -> list[Callable[[Any], Any]]:
        """The decorators of :mod:`attr` for what the configuration needs."""
        if self.use_chainerx:
            return [attr.chainerx]
        if not self.use_cuda:
            return [attr.ideep] if self.use_ideep != "never" else []
        needs = [attr.gpu] if self.use_cudnn == "never" else [attr.cudnn]
        return [*needs, attr.multi_gpu(self.cuda_device + 1)] if self.cuda_device else needs


def inject_backend_tests(method_names: Sequence[str] | None, params: list[dict[str, Any]]) -> Callable[[Any], Any]:
    """A decorator of test classes: each of the methods becomes one for each configuration.

    Args:
        method_names: methods that take a :class:`BackendConfig` after self; None for all tests that do.
        params: dictionaries for :class:`BackendConfig`. Those that need a missing GPU are skipped, as are iDeep and
            ChainerX.
    """
    if not (method_names is None or isinstance(method_names, (list, tuple))):
        raise TypeError(f"method_names: expected a list of names or None, got {method_names!r}")
    if not isinstance(params, list) or not all(isinstance(p, dict) for p in params):
        raise TypeError(f"params: expected a list of dictionaries, got {params!r}")
    configs = [BackendConfig(p) for p in params]

    def decorate(case: Any) -> Any:
        for cls in classes_of(case):
            for name in _taking_config(cls) if method_names is None else method_names:
                _inject(cls, name, configs)
        return case

    return decorate


def _taking_config(cls: type) -> list[str]:
    found = []
    for name in dir(cls):
        test = getattr(cls, name)
        if name.startswith("test") and callable(test) and "backend_config" in inspect.signature(test).parameters:
            found.append(name)
    return found


def _inject(cls: type, name: str, configs: list[BackendConfig]) -> None:
    test = getattr(cls, name)
    setattr(cls, name, None)  # no runner takes it for a test any more, an inherited one neither
    for config in configs:
        new_name = f"{name}__{config.get_func_str()}"
        if hasattr(cls, new_name):
            raise RuntimeError(f"{cls.__name__}.{new_name} is there already: two of the configurations are equal")
        setattr(cls, new_name, _with_config(test, new_name, config))


def _with_config(test: Callable[..., Any], name: str, config: BackendConfig) -> Callable[..., Any]:
    @functools.wraps(test)
    def configured(self: Any, *args: Any, **kwargs: Any) -> None:
        test(self, config, *args, **kwargs)

    del configured.__wrapped__  # type: ignore[attr-defined]  # pytest would look for a fixture `backend_config`
    configured.__name__ = name
    for mark in config.get_pytest_marks():
        configured = mark(configured)
    return configured
