"""Decorators of tests that need a device or much time.

Each skips its test where the device is missing, under unittest and pytest alike. Where pytest runs, the test also gets
the marker of that name (``gpu``, ``multi_gpu``, ``cudnn``, ``slow``, ``chainerx``, ``ideep``), so that
``pytest -m "not slow"`` leaves it out.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from dbrdist.backends import cuda

T = TypeVar("T")


def _num_gpus() -> int:
    return int(cuda.cupy.cuda.runtime.getDeviceCount()) if cuda.available else 0


def _marked(test: T, name: str, **kwargs: Any) -> T:
    """The test with a marker of pytest, where pytest is what runs."""
    pytest = sys.modules.get("pytest")
    if pytest is None:
        return test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a project that has not registered the marker
        marker = getattr(pytest.mark, name)
    return (marker(**kwargs) if kwargs else marker)(test)  # type: ignore[no-any-return]


def multi_gpu(gpu_num: int) -> Callable[[T], T]:
    """A decorator of tests that need ``gpu_num`` GPUs."""

    def decorate(test: T) -> T:
        skip = unittest.skipIf(_num_gpus() < gpu_num, f"needs {gpu_num} GPUs, found {_num_gpus()}")
        return _marked(_marked(skip(test), "multi_gpu", gpu=gpu_num), "gpu")

    return decorate


def gpu(test: T) -> T:
    """A test that needs a GPU."""
    return _marked(unittest.skipUnless(_num_gpus(), "needs a GPU and CuPy")(test), "gpu")


def cudnn(test: T) -> T:
    """A test that needs a GPU with cuDNN."""
    return _marked(gpu(test), "cudnn")


def slow(test: T) -> T:
    """A test that takes long."""
    return _marked(test, "slow")


def chainerx(test: T) -> T:
    """A test that needs ChainerX, which dbrdist does not have: it is always skipped."""
    return _marked(unittest.skip("needs ChainerX, which dbrdist does not have")(test), "chainerx")


def ideep(test: T) -> T:
    """A test that needs iDeep, in whose place dbrdist has oneDNN: it is always skipped."""
    return _marked(unittest.skip("needs iDeep, in whose place dbrdist has oneDNN")(test), "ideep")
