"""Random numbers of tests: the same in each run, and matrices with given singular values."""

from __future__ import annotations

import functools
import os
import random as python_random
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array import random
from dbrdist.testing.bundle import classes_of

_SEED = 100
_saved: list[Any] = []  # the states before the tests that run now, outermost first


def _set_up() -> None:
    """Start all generators from the seed. Within a test that has done so (for example a retried one) they continue."""
    _saved.append((python_random.getstate(), np.random.get_state(), random.get_state()))
    if len(_saved) == 1:
        varies = bool(int(os.environ.get("CHAINER_TEST_RANDOM_NONDETERMINISTIC", "0")))
        seed = int.from_bytes(os.urandom(4), "little") if varies else _SEED
        python_random.seed(seed)
        np.random.seed(seed)
        random.set_state((seed, *random.get_state()[1:]))


def _tear_down() -> None:
    states = _saved.pop()
    if not _saved:
        python_random.setstate(states[0])
        np.random.set_state(states[1])
        random.set_state(states[2])


def generate_seed() -> int:
    """A seed below 2**32 - 1 for a generator of the test's own, from the fixed numbers of :func:`fix_random`.

    Example:
        >>> @dbrdist.testing.fix_random()
        ... def test_noise():
        ...     return np.random.default_rng(dbrdist.testing.generate_seed()).normal()
        >>> test_noise() == test_noise()
        True
    """
    if not _saved:
        raise RuntimeError("expected to be called in a test under @fix_random(), which fixes the random numbers")
    return int(np.random.randint(0xFFFFFFFF, dtype=np.int64))


def fix_random(*, setup_method: str = "setUp", teardown_method: str = "tearDown") -> Callable[[Any], Any]:
    """A decorator of test classes and test methods: random numbers are the same in each run.

    ``random``, ``numpy.random`` and ``dbrdist.random`` start from a fixed seed before each test and continue as before
    after it. Use it above ``condition.retry``, not below: there each run would get the same numbers. With
    ``CHAINER_TEST_RANDOM_NONDETERMINISTIC=1`` in the environment the seed is another one each time.

    Args:
        setup_method: the name of the method that runs before each test of a class.
        teardown_method: the name of the method that runs after it.

    Example:
        >>> @dbrdist.testing.fix_random()
        ... def draw():
        ...     return np.random.rand()
        >>> draw() == draw()
        True
    """

    def decorate(case: Any) -> Any:
        if isinstance(case, types.FunctionType):
            return _fixed(case)
        for cls in classes_of(case):
            _fix_class(cls, setup_method, teardown_method)
        return case

    return decorate


def _fixed(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def fixed(*args: Any, **kwargs: Any) -> Any:
        _set_up()
        try:
            return test(*args, **kwargs)
        finally:
            _tear_down()

    return fixed


def _fix_class(cls: Any, setup_method: str, teardown_method: str) -> None:
    set_up, tear_down = getattr(cls, setup_method), getattr(cls, teardown_method)

    @functools.wraps(set_up)
    def new_set_up(self: Any, *args: Any) -> None:
        _set_up()
        try:
            set_up(self, *args)
        except BaseException:  # unittest and pytest call no tearDown then
            _tear_down()
            raise

    @functools.wraps(tear_down)
    def new_tear_down(self: Any, *args: Any) -> None:
        try:
            tear_down(self, *args)
        finally:
            _tear_down()

    setattr(cls, setup_method, new_set_up)
    setattr(cls, teardown_method, new_tear_down)


def generate_matrix(
    shape: tuple[int, ...], dtype: DTypeLike = float, **kwargs: complex | int | Sequence[float]
) -> np.ndarray:
    """A random matrix, or a stack of them, with the given singular values.

    Args:
        shape: (..., M, N).
        dtype: a floating or complex type.
        kwargs: ``singular_values``, an array of numbers of 0 or more that broadcasts to shape (..., min(M, N)).

    Example:
        >>> dbrdist.testing.generate_matrix((2, 2), singular_values=1.0).shape
        (2, 2)
    """
    if set(kwargs) != {"singular_values"}:
        raise TypeError(f"expected singular_values and no other keyword, got {', '.join(kwargs) or 'none'}")
    values, dtype = np.asarray(kwargs["singular_values"]), np.dtype(dtype)
    if len(shape) < 2:
        raise ValueError(f"shape: expected two axes or more for matrices, got {shape}")
    if dtype.kind not in "fc":
        raise TypeError(f"dtype: expected a floating or complex type, got {dtype}")
    if values.dtype.kind not in "fiu":
        raise TypeError(f"singular_values: expected real numbers, got {values.dtype}")
    if (values < 0).any():
        raise ValueError(f"singular_values: expected none below 0, got {values.min()}")
    a = np.random.standard_normal(shape)
    if dtype.kind == "c":
        a = a + 1j * np.random.standard_normal(shape)
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    return ((u * np.broadcast_to(values, s.shape)[..., None, :]) @ vh).astype(dtype)
