"""Small helpers of tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pydoc
import re
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from dbrdist.core.files import hdf5, serializer
from dbrdist.training.trainer import Trainer
from dbrdist.utils.files import tempdir

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


@contextmanager
def assert_warns(expected: type[Warning]) -> Iterator[None]:
    """Raise an AssertionError unless a warning is given within the ``with`` block.

    Args:
        expected: the class of the warning.

    Example:
        >>> import warnings
        >>> with dbrdist.testing.assert_warns(UserWarning):
        ...     warnings.warn("careful", UserWarning)
    """
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield
    if not any(isinstance(w.message, expected) for w in given):
        others = ", ".join(type(w.message).__name__ for w in given) or "none"
        raise AssertionError(f"expected a warning of type {expected.__name__}, got {others}")


def patch(target: str, *args: Any, **kwargs: Any) -> Any:
    """``unittest.mock.patch`` with a mock that calls what it replaces: for tests of how often something is called.

    Args:
        target: the full name of what is replaced, as for ``unittest.mock.patch``.
        args: further arguments of ``unittest.mock.patch``.
        kwargs: the same by name.

    Example:
        >>> with dbrdist.testing.patch("math.sqrt") as mock:
        ...     import math
        ...     math.sqrt(4.0), mock.call_count
        (2.0, 1)
    """
    if not args and not {"new", "new_callable", "wraps"} & kwargs.keys():
        kwargs["wraps"] = pydoc.locate(target)
    return mock.patch(target, *args, **kwargs)


# ---- requirements ---------------------------------------------------------------------------------------------------

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def _version(text: str) -> tuple[tuple[int, ...], bool]:
    """A version for comparison: its numbers without zeros at the end, and whether it is before its release."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    if found is None:
        raise ValueError(f"expected a version such as 1.10, got {text!r}")
    numbers = [int(n) for n in found.group().split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    is_before = re.match(r"[._-]?(a|b|c|rc|dev|alpha|beta|pre)", text.strip()[found.end() :]) is not None
    return (tuple(numbers), not is_before)


def _is_satisfied(requirement: str) -> bool:
    found = re.fullmatch(r"\s*([\w.-]+)\s*((?:[<>=!]=?\s*[^,<>=!]+,?\s*)*)", requirement)
    if found is None:
        raise ValueError(f"expected a requirement such as 'numpy>=1.10,<3', got {requirement!r}")
    try:
        installed = _version(importlib.metadata.version(found[1]))
    except importlib.metadata.PackageNotFoundError:
        return False
    clauses = re.findall(r"(==|!=|>=|<=|>|<)\s*([^,]+)", found[2])
    return all(_COMPARISONS[sign](installed, _version(version)) for sign, version in clauses)


def with_requires(*requirements: str) -> Callable[[Any], Any]:
    """A decorator that skips a test unless all requirements, such as ``'numpy>=1.10'``, are installed.

    Args:
        requirements: requirements of pip.

    Example:
        >>> @dbrdist.testing.with_requires("numpy>=1.10")
        ... def test_numpy():
        ...     return "ran"
        >>> test_numpy()
        'ran'
    """
    met = all(_is_satisfied(r) for r in requirements)
    return unittest.skipUnless(met, f"requires: {', '.join(requirements)}")


def without_requires(*requirements: str) -> Callable[[Any], Any]:
    """A decorator that skips a test if all requirements are installed.

    Args:
        requirements: requirements of pip.

    Example:
        >>> @dbrdist.testing.without_requires("no-such-package")
        ... def test_other():
        ...     return "ran"
        >>> test_other()
        'ran'
    """
    met = all(_is_satisfied(r) for r in requirements)
    return unittest.skipIf(met, f"requires that these are not installed: {', '.join(requirements)}")


# ---- saving, training, running --------------------------------------------------------------------------------------


def save_and_load(
    src: Link, dst: Link, filename: str, saver: Callable[[str, Any], Any], loader: Callable[[str, Any], Any]
) -> None:
    """Save ``src`` with ``saver(path, src)`` and load that into ``dst`` with ``loader(path, dst)``.

    Args:
        src: the object to save.
        dst: the object to fill.
        filename: the name of the file, in a temporary folder.
        saver: ``saver(path, src)`` writes the file.
        loader: ``loader(path, dst)`` reads it.

    Example:
        >>> a, b = L.Linear(2, 1), L.Linear(2, 1)
        >>> dbrdist.testing.save_and_load(a, b, "a.npz", serializers.save_npz, serializers.load_npz)
        >>> bool((a.W.array == b.W.array).all())
        True
    """
    with tempdir() as folder:
        path = os.path.join(folder, filename)
        saver(path, src)
        loader(path, dst)


def save_and_load_npz(src: Link, dst: Link) -> None:
    """Save ``src`` to an ``.npz`` file and load that into ``dst``.

    Args:
        src: the object to save.
        dst: the object to fill.

    Example:
        >>> a, b = L.Linear(2, 1), L.Linear(2, 1)
        >>> dbrdist.testing.save_and_load_npz(a, b)
        >>> bool((a.W.array == b.W.array).all())
        True
    """
    save_and_load(src, dst, "tmp.npz", serializer.save_npz, serializer.load_npz)


def save_and_load_hdf5(src: Link, dst: Link) -> None:
    """Save ``src`` to an HDF5 file and load that into ``dst``.

    Args:
        src: the object to save.
        dst: the object to fill.
    """
    save_and_load(src, dst, "tmp.h5", hdf5.save_hdf5, hdf5.load_hdf5)


def get_trainer_with_mock_updater(
    stop_trigger: Any = (10, "iteration"), iter_per_epoch: int = 10, extensions: Any = None
) -> Trainer:
    """A trainer whose updater only counts: for tests of extensions and triggers.

    ``trainer.updater`` is a mock. Each step calls its ``update_core()`` and moves ``iteration``, ``epoch``,
    ``epoch_detail``, ``previous_epoch_detail`` and ``is_new_epoch``, with ``iter_per_epoch`` steps to an epoch.

    Args:
        stop_trigger: when the trainer stops.
        iter_per_epoch: the number of steps of an epoch.
        extensions: extensions to begin with.

    Example:
        >>> trainer = dbrdist.testing.get_trainer_with_mock_updater((3, "iteration"))
        >>> trainer.updater.update()
        >>> trainer.updater.iteration
        1
    """
    updater = mock.Mock()
    updater.get_all_optimizers.return_value = {}
    updater.iteration = updater.epoch = 0
    updater.epoch_detail = 0.0
    updater.is_new_epoch = True
    updater.previous_epoch_detail = None

    def update() -> None:
        updater.update_core()
        before, updater.previous_epoch_detail = updater.epoch, updater.epoch_detail
        updater.iteration += 1
        updater.epoch = updater.iteration // iter_per_epoch
        updater.epoch_detail = updater.iteration / iter_per_epoch
        updater.is_new_epoch = updater.epoch != before

    updater.update = update
    return Trainer(updater, stop_trigger, extensions=extensions)


def run_module(name: str, file: str) -> None:
    """Run the tests of a file that is itself the program: ``testing.run_module(__name__, __file__)``.

    pytest runs them where it is installed, else unittest. The process ends with their exit status.

    Args:
        name: ``__name__`` of the file; nothing happens unless it is ``"__main__"``.
        file: ``__file__`` of the file.

    Example:
        >>> dbrdist.testing.run_module("imported", "tests.py")
    """
    if name != "__main__":
        return
    if importlib.util.find_spec("pytest") is None:
        unittest.main(module="__main__", argv=[file])
    import pytest

    sys.exit(int(pytest.main([file, "-v"])))
