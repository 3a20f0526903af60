"""Tests of dbrdist.core.array.observed."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core.array.config import config
from dbrdist.core.array.observed import observed, observed_index
from tests.each import each

X = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]], "f")


@pytest.fixture
def seen(monkeypatch):
    found = []
    monkeypatch.setitem(config.__dict__, "_observer", lambda *words: found.append(words))
    return found


@each(name=["argmax", "argmin"], axis=[None, 0, 1, -1])
def test_an_index_is_reported_with_its_axis(seen, name, axis):
    seen.clear()
    y = observed_index(name, X, axis)
    np.testing.assert_array_equal(y, getattr(np, name)(X, axis))
    assert y.dtype == np.int32
    assert seen == [(name, {"axis": axis}, (X,), y)] and seen[0][2][0] is X and seen[0][3] is y


def test_a_formula_is_reported_with_all_that_it_takes(seen):
    y = observed(np.add, X, 2)
    np.testing.assert_array_equal(y, X + 2)
    ((name, settings, xs, found),) = seen
    assert (name, settings, xs[1]) == ("add", {}, 2) and xs[0] is X and found is y


def test_nobody_need_observe():
    np.testing.assert_array_equal(observed(np.add, X, 2), X + 2)
    assert observed_index("argmax", X, None).dtype == np.int32
