"""Tests of dbrdist.functions.sequence."""

from __future__ import annotations

import numpy as np

import dbrdist.functions as F


def test_transposing_twice_gives_the_sequences_back():
    xs = [np.arange(n * 2, dtype="f").reshape(n, 2) for n in (4, 2, 1)]
    for x, back in zip(xs, F.transpose_sequence(F.transpose_sequence(xs)), strict=True):
        np.testing.assert_array_equal(back.array, x)


def test_no_sequences_transpose_to_none():
    assert F.transpose_sequence([]) == ()
