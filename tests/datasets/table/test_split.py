"""Tests of dbrdist.datasets.table.split."""

from __future__ import annotations

import pytest

from dbrdist import datasets
from dbrdist.datasets import (
    SubDataset,
    get_cross_validation_datasets,
    get_cross_validation_datasets_random,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)
from dbrdist.errors import UsageWarning
from tests.each import each


@each(part=["n_folds", "n_fold", "position"])
def test_folds_under_either_name(part):
    data = [10, 11, 12, 13, 14]
    folds = datasets.get_cross_validation_datasets(data, *([2] if part == "position" else []), **(
        {} if part == "position" else {part: 2}))  # fmt: skip
    assert [(list(a), list(b)) for a, b in folds] == [([10, 11], [12, 13, 14]), ([12, 13, 14], [10, 11])]
    ordered = datasets.get_cross_validation_datasets(data, 5, order=[4, 3, 2, 1, 0])
    assert [list(test) for _, test in ordered] == [[10], [11], [12], [13], [14]]
    for n in (0, 6):
        with pytest.raises(ValueError, match=str(n)):
            datasets.get_cross_validation_datasets(data, n)
    one, zero = (datasets.get_cross_validation_datasets_random(data, 5, seed) for seed in (1, 0))
    none = datasets.get_cross_validation_datasets_random(data, 5)
    assert [list(b) for _, b in none] == [list(b) for _, b in zero] != [list(b) for _, b in one]


def test_sub_dataset():
    data = SubDataset(list("abcdef"), 1, 4, order=[5, 4, 3, 2, 1, 0])
    assert (len(data), list(data), data[-1]) == (3, ["e", "d", "c"], "c")
    with pytest.raises(IndexError, match="below 3"):
        data[3]
    with pytest.raises(ValueError, match="got start=1 and finish=9"):
        SubDataset([1, 2], 1, 9)
    with pytest.raises(ValueError, match="order of all 2 examples, got one of 1"):
        SubDataset([1, 2], 0, 1, [0])


def test_splits_cover_the_dataset_once():
    data = list(range(11))
    first, second = split_dataset(data, 4)
    assert (list(first), list(second)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10])
    first, second = split_dataset_random(data, 4, seed=1)
    assert (len(first), sorted([*first, *second])) == (4, data)
    assert (
        list(first) == list(split_dataset_random(data, 4, seed=1)[0]) != list(split_dataset_random(data, 4, seed=2)[0])
    )
    assert [list(p) for p in split_dataset_n(data, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    parts = split_dataset_n_random(data, 3, seed=1)
    assert len({x for p in parts for x in p}) == 9
    with pytest.raises(ValueError, match="split_at from 0 to 11, the number of examples, got 12"):
        split_dataset(data, 12)
    with pytest.raises(TypeError, match=r"integer split_at, got 0.5"):
        split_dataset(data, 0.5)
    with pytest.raises(ValueError, match="from 1 to 11 parts"):
        split_dataset_n(data, 12)


@pytest.mark.parametrize(
    "folds",
    [get_cross_validation_datasets(range(11), 3), get_cross_validation_datasets_random(range(11), 3, seed=2)],
)
def test_each_example_is_tested_in_one_fold(folds):
    assert [len(test) for _, test in folds] == [4, 4, 3]
    assert sorted(x for _, test in folds for x in test) == list(range(11))
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(11))


def test_one_part_is_the_whole():
    assert [list(part) for part in split_dataset_n([1, 2, 3], 1)] == [[1, 2, 3]]
    with pytest.warns(UsageWarning, match="none are left to train on"):
        ((train, test),) = get_cross_validation_datasets([1, 2, 3], 1)
    assert (list(train), list(test)) == ([], [1, 2, 3])
    assert [sorted(part) for part in split_dataset_random([1, 2, 3], 0)] == [[], [1, 2, 3]]
    first, second = (list(part) for part in split_dataset([1, 2, 3], 3))
    assert (first, second) == ([1, 2, 3], [])
    assert list(SubDataset([1, 2], 2, 2)) == []
    for start, finish in ((-1, 1), (2, 1), (0, 3)):
        with pytest.raises(ValueError, match=f"got start={start} and finish={finish}"):
            SubDataset([1, 2], start, finish)
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to 3 parts, the number of examples, got {n}"):
            split_dataset_n([1, 2, 3], n)
    for at in (-1, 4):
        with pytest.raises(ValueError, match=f"split_at from 0 to 3, the number of examples, got {at}"):
            split_dataset([1, 2, 3], at)
    whole = list(range(9))
    parts = [[list(part) for part in split_dataset_n_random(whole, 2, seed)] for seed in (None, 0, 1)]
    assert parts[0] == parts[1] != parts[2]


def test_booleans_are_no_order():
    with pytest.raises(ValueError, match=r"an order of integers, got booleans; examples of a mask are dataset\[mask\]"):
        split_dataset([1, 2, 3], 2, [True, False, True])
