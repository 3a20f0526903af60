"""Sizes that are integers of NumPy, as ``labels.max() + 1`` is: in 8 bits 4 * 100 is 144, with a warning at most.

What a size is used for is compared with the same size as Python's integer. Warnings are errors here.
"""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist import iterators
from dbrdist import links as L
from dbrdist.core.names.limits import limits_of, make_plain
from dbrdist.datasets import get_cross_validation_datasets, split_dataset, split_dataset_n
from dbrdist.optimizers import schedules

NUMBERS = list(range(300))


def of(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def positions(batch_size):
    """What an iterator reads in two epochs, and where it is."""
    iterator = iterators.SerialIterator(NUMBERS, batch_size, shuffle=False)
    return [(next(iterator), iterator.epoch, iterator.epoch_detail) for _ in range(7)]


SIZES = {
    "batch_size": (positions, 100),
    "outputs of an LSTM": (lambda n: L.LSTM(4, n)(of(2, 4)).shape, 100),
    "units of an NStepLSTM": (lambda n: L.NStepLSTM(2, 4, n, 0.0)(None, None, [of(3, 4)])[2][0].shape, 100),
    "channels": (lambda n: L.Inception(3, n, n, n, n, n, n)(of(1, 3, 5, 5)).shape, 100),
    "pair": (lambda n: L.Convolution2D(3, 4, (n, n), pad=[n, n])(of(1, 3, 9, 9)).shape, 3),
    "pool_size": (lambda n: F.maxout(of(2, 200), n).array, 100),
    "reps": (lambda n: F.tile(of(2, 3), n).array, 100),
    "reps of axes": (lambda n: F.tile(of(2, 3), (n, n)).array, 100),
    "r of depth": (lambda n: F.depth2space(of(1, 400, 9, 9), n).array, 20),
    "r of space": (lambda n: F.space2depth(of(1, 1, 180, 180), n).array, 20),
    "groups": (lambda n: F.convolution_2d(of(1, 100, 7, 6), of(200, 1, 2, 2), groups=n).array, 100),
    "groups of a transpose": (lambda n: F.deconvolution_2d(of(1, 200, 7, 6), of(200, 2, 2, 2), groups=n).array, 100),
    "groups of one axis": (lambda n: F.deconvolution_1d(of(1, 200, 7), of(200, 2, 2), groups=n).array, 100),
    "groups of norms": (lambda n: F.group_normalization(of(2, 100, 3), n, of(100), of(100)).array, 50),
    "split_at": (lambda n: [len(part) for part in split_dataset(NUMBERS, n)], 100),
    "parts": (lambda n: [len(part) for part in split_dataset_n(NUMBERS, n)], 3),
    "folds": (lambda n: [len(test) for _, test in get_cross_validation_datasets(NUMBERS, n)], 3),
}


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.array])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_of_numpy_is_the_size_that_it_shows(name, kind):
    made, size = SIZES[name]
    if kind is np.array and name in ("reps", "split_at", "parts", "folds", "groups of norms"):
        return  # arrays are refused there, or are sizes of axes
    narrow = made(kind(size))  # first, so that nothing of the other call is remembered
    np.testing.assert_equal(narrow, made(size))


def test_arguments_become_integers_of_python():
    def function(self, n: int, m: int | None = None, *, sizes: int = 1, rate: float = 1.0) -> None:
        """What takes integers."""

    args, kwargs = [None, np.uint8(3), None], {"sizes": np.array(2), "rate": np.float32(1), "more": np.int8(1)}
    make_plain(limits_of(function), args, kwargs)
    assert [type(value) for value in (*args, *kwargs.values())] == [
        type(None),
        int,
        type(None),
        int,
        np.float32,
        np.int8,
    ]
    assert L.Linear(np.int64(3), np.int16(2)).printable_specs is not None
    assert [type(n) for n in (L.Linear(np.int64(3), np.int16(2)).out_size, L.Linear(np.uint8(3), 2).in_size)] == [
        int,
        int,
    ]


def test_schedules_take_them():
    assert schedules.step(1.0, 0.5, [np.uint8(200)])(300.0) == 0.5
