"""Formulas of several steps on operands of every kind: blocks, layouts and 16-bit types change nothing but the time."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core import backend, elementwise
from tests.each import each

SHAPE = (2, 3, 4, 5)
BF16 = backend.as_dtype("bfloat16")


def images(a):
    return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


# How an operand lies: from the values of a whole array to an array that broadcasts to it.
LAYOUTS = {
    "whole": lambda a: a,
    "images": images,
    "turned": lambda a: np.ascontiguousarray(a.T).T,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "from the end": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "a channel's": lambda a: a[:1, :, :1, :1],
    "a row's": lambda a: a[0, 0, 0],
    "of two axes": lambda a: a[0, 0, :, :1],
    "repeated": lambda a: np.broadcast_to(a[0, 0, 0, 0], SHAPE),
    "rows repeated": lambda a: np.broadcast_to(a[:, :, :1], SHAPE),
    "a number in an array": lambda a: a[0, 0, 0, 0, ...],
    "one element": lambda a: a[:1, 0, 0, 0],
    "a number of NumPy": lambda a: a[0, 0, 0, 0],
    "a number": lambda a: 0.75,
}


def formula(x, y, z):
    return np.tanh(x * y) + z / (1 + np.abs(y))


def expected(xs):
    """In float32, rounded once, where all floating operands have 16 bits and one type; else as NumPy promotes."""
    types = {x.dtype for x in xs if hasattr(x, "dtype") and x.dtype.kind in "fV"}
    narrow = types.pop() if len(types) == 1 and next(iter(types)).itemsize == 2 else None
    if narrow is None:
        return formula(*xs)
    wide = [x.astype("f") if getattr(x, "dtype", None) == narrow else x for x in xs]
    return np.asarray(formula(*wide)).astype(narrow)


@pytest.fixture(params=["at once", "in blocks of 7", "in blocks of 13", "in blocks of 60"])
def blocks(request, monkeypatch):
    if request.param != "at once":
        monkeypatch.setattr(elementwise, "_AT_ONCE_ELEMENTS", 1)
        monkeypatch.setattr(elementwise, "_BLOCK_ELEMENTS", int(request.param.split()[-1]))


def drawn(first, second, types):
    rng = np.random.default_rng(0)
    layouts = (LAYOUTS[first], LAYOUTS[second], LAYOUTS["whole" if types[2] else "a number"])
    return [lay(rng.uniform(0.1, 2, SHAPE).astype(t or "f")) for lay, t in zip(layouts, types, strict=True)]


@each(types=[("f", "f", "f"), ("d", "d", None), ("f", "d", None), ("f", "i", None)], first=LAYOUTS, second=LAYOUTS)
def test_values_are_those_of_the_formula(blocks, types, first, second):
    xs = drawn(first, second, types)
    y, e = elementwise.fused(formula, *xs), formula(*xs)
    assert np.shape(y) == np.shape(e) and y.dtype == e.dtype
    np.testing.assert_allclose(y, e, rtol=1e-6 if e.dtype == "f" else 1e-14)


@each(types=[(BF16, BF16, BF16), ("e", "e", None), (BF16, "f", None), ("i", BF16, None)], first=LAYOUTS, second=LAYOUTS)
def test_16_bit_types_are_rounded_once(blocks, types, first, second):
    xs = drawn(first, second, types)
    y, e = elementwise.fused(formula, *xs), expected(xs)
    assert np.shape(y) == np.shape(e) and y.dtype == e.dtype
    same = np.asarray(y).astype("d") == np.asarray(e).astype("d")
    assert same.mean() > 0.97  # NumPy's tanh of float32 depends on where a number lies
    np.testing.assert_allclose(np.asarray(y).astype("d"), np.asarray(e).astype("d"), rtol=2.0**-7)


@each(first=LAYOUTS, second=LAYOUTS)
def test_images_stay_images(blocks, first, second):
    xs = drawn(first, second, ("f", "f", None))
    y = elementwise.fused(formula, *xs)
    if any(getattr(x, "shape", ()) == SHAPE and backend.lies_as_images(x) for x in xs):
        assert y.shape == SHAPE and backend.lies_as_images(y)
