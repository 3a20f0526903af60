"""Tests of dbrdist.datasets.table.combine."""

import numpy as np
import pytest

from dbrdist.datasets import (
    AugmentedDataset,
    ConcatenatedDataset,
    DictDataset,
    MixedDataset,
    Mixup,
    SkipExample,
    SubDataset,
    TransformDataset,
    TupleDataset,
)
from dbrdist.datasets.loading.base import get_batch
from dbrdist.datasets.loading.convert import concat_examples
from tests.datasets.loader_examples import Noisy, Numbers

_DATA = {
    "own": TransformDataset(Numbers(5), lambda pair: int(pair[1])),
    "part": SubDataset([7, *range(5)], 1, 6),
    "joined": ConcatenatedDataset([0, 1], [2, 3, 4]),
    "transformed": TransformDataset([0, 1, 2, 3, 4], lambda x: x),
    "a list beside an array": TransformDataset(TupleDataset([0, 1, 2, 3, 4], np.arange(5)), lambda pair: pair[0]),
}


@pytest.mark.parametrize("make", [list, np.array])
@pytest.mark.parametrize("name", _DATA)
def test_a_mask_of_booleans_selects_examples(name, make):
    """Booleans were taken for the examples 0 and 1, and beside an array for other examples than those of the array."""
    data, mask = _DATA[name], make([False, True, False, True, True])
    assert [int(x) for x in data[mask]] == [1, 3, 4]
    assert TupleDataset(np.arange(5), data)[mask] == [(i, data[i]) for i in (1, 3, 4)]
    assert DictDataset(a=np.arange(5), b=data)[mask] == [{"a": i, "b": data[i]} for i in (1, 3, 4)]
    with pytest.raises(IndexError, match="a mask of 5 booleans, one for each example, got 6"):
        data[make([True] * 6)]


def test_a_list_of_indices_reads_lists_beside_arrays():
    wanted = [(4, "e"), (0, "a")]
    assert TupleDataset(np.arange(5), "abcde")[[4, 0]] == TupleDataset(range(5), "abcde")[np.array([4, 0])] == wanted
    assert DictDataset(a=list(range(5)), b=np.arange(5))[[3]] == [{"a": 3, "b": 3}]


def test_tuple_dataset():
    data = TupleDataset(np.arange(4) * 10, [1, 2, 3, 4])
    assert len(data) == 4
    assert data[2] == (20, 3)
    assert data[1:3] == [(10, 2), (20, 3)]
    with pytest.raises(ValueError, match=r"datasets of one length for TupleDataset, got {'0': 2, '1': 3}"):
        TupleDataset([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least one dataset"):
        TupleDataset()


def test_dict_dataset():
    data = DictDataset(x=np.arange(4) * 10, y=[1, 2, 3, 4])
    assert data[2] == {"x": 20, "y": 3}
    assert data[:2] == [{"x": 0, "y": 1}, {"x": 10, "y": 2}]
    with pytest.raises(ValueError, match=r"{'x': 1, 'y': 2}"):
        DictDataset(x=[1], y=[1, 2])


@pytest.mark.parametrize(
    "data",
    [
        TupleDataset(np.arange(12).reshape(6, 2), np.arange(6)),
        DictDataset(x=np.arange(12).reshape(6, 2), y=np.arange(6)),
        np.arange(12).reshape(6, 2),
    ],
)
def test_arrays_are_batched_without_a_loop(data):
    indices = np.array([4, 0, 4])
    batch = get_batch(data, indices, 0, 0, [])
    expected = concat_examples([data[int(i)] for i in indices])
    for fast, slow in zip(*[b.values() if isinstance(b, dict) else b for b in (batch.arrays, expected)]):
        assert np.array_equal(fast, slow)
    assert len(batch) == 3 and isinstance(batch[0], type(data[0]))


def test_concatenated_dataset():
    data = ConcatenatedDataset([1, 2], [], [3, 4, 5])
    assert len(data) == 5
    assert list(data) == [1, 2, 3, 4, 5]
    assert (data[-1], data[1:4]) == (5, [2, 3, 4])
    with pytest.raises(IndexError, match="below 5, the number of examples, got 5"):
        data[5]


def test_indices_from_either_end():
    joined = ConcatenatedDataset([10, 11], [12], [13, 14, 15], [16])
    part = SubDataset(list(range(20)), 10, 17)
    for data in (joined, part):
        assert [data[i] for i in range(-7, 7)] == [*range(10, 17)] * 2
        for i in (7, -8):
            with pytest.raises(IndexError, match=f"expected an index below 7, the number of examples, got {i}"):
                data[i]
    assert len(ConcatenatedDataset()) == 0


def test_random_changes_by_index_are_those_of_the_first_epoch():
    """With seed 0; each other epoch and seed has changes of its own."""
    data = AugmentedDataset([5, 6, 7], lambda example, rng: (example, int(rng.integers(1 << 40))))
    mixed = MixedDataset([(np.full((2, 2, 1), 50 * i, np.uint8), i % 2) for i in range(4)], [Mixup(1.0)], 2)
    for dataset in (data, mixed):
        for i in range(len(dataset)):
            assert str(dataset[i]) == str(dataset.example_at(i, 0, 0))
            seen = {str(dataset.example_at(i, seed, epoch)) for seed in range(4) for epoch in range(4)}
            assert len(seen) > 8
    assert data[-1] == data[2] and data[1][0] == 6


def test_dictionaries_of_examples_of_an_epoch():
    data = DictDataset(a=Noisy(8), b=list("abcdefgh"))
    example = data.example_at(5, 7, 4)
    assert example["a"][0].tolist() == [7, 4, 5] and example["b"] == "f"
    first, second = get_batch(data, np.array([2, 6]), 7, 4, [])
    assert (first["a"][0].tolist(), second["a"][0].tolist()) == ([7, 4, 2], [7, 4, 6])
    assert (first["b"], second["b"]) == ("c", "g")
    plain = DictDataset(a=Noisy(8), b=np.array(list("abcdefgh")))
    for found in (plain[[1, 3]], plain[np.array([1, 3])], plain[1:4:2]):
        assert [row["b"] for row in found] == ["b", "d"]


def test_examples_that_are_skipped_leave_the_others_of_their_batch():
    class Holes(Numbers):
        def get_example(self, i):
            if i == 3:
                raise SkipExample("number 3 is unreadable")
            return i

    for data in (TupleDataset(Holes(6), list("abcdef")), DictDataset(x=Holes(6), t=list("abcdef"))):
        skipped = []
        found = get_batch(data, np.array([2, 3, 5]), 0, 0, skipped)
        rows = [tuple(row.values()) if isinstance(row, dict) else row for row in found]
        assert rows == [(2, "c"), (5, "f")] and skipped == ["number 3 is unreadable"]


def test_transform_dataset():
    assert TransformDataset([1, 2, 3], lambda x: -x)[1:] == [-2, -3]


def test_wrappers_pass_seed_and_epoch_on_with_the_index_below():
    noisy = Noisy(8)
    wrapped = TransformDataset(ConcatenatedDataset(Noisy(3), SubDataset(noisy, 2, 6)), lambda example: example[0])
    assert [x.tolist() for x in get_batch(wrapped, np.array([1, 3, 5]), 7, 4, [])] == [[7, 4, 1], [7, 4, 2], [7, 4, 4]]
    both = TupleDataset(noisy, Numbers(8))
    assert get_batch(both, np.array([5]), 7, 4, [])[0][0][0].tolist() == [7, 4, 5]


def _in_place(example, rng):
    if isinstance(example, dict):
        for part in example.values():
            part *= 2
        return example
    (x, z), y = example
    x *= 2
    z[0] += 1
    y *= 2
    return (x, z), y


def test_a_transform_that_works_in_place_gets_copies_of_examples():
    """Otherwise what is seen in an epoch would depend on how often an example was read before, and by which process."""
    x, z, y = np.arange(1.0, 7).reshape(3, 2), [[1], [2], [3]], np.arange(1, 4)
    data = AugmentedDataset([((x[i], z[i]), y[i : i + 1]) for i in range(3)], _in_place)
    for _ in range(2):
        (first, second), third = data[1]
        assert (first.tolist(), second, third.tolist()) == ([6, 8], [3], [4])
        ((first, second), third), _ = get_batch(data, np.array([2, 0]), 0, 0, [])
        assert (first.tolist(), second, third.tolist()) == ([10, 12], [4], [6])
    assert (x.sum(), z, y.tolist()) == (21, [[1], [2], [3]], [1, 2, 3])
    named = {"x": np.ones(2)}
    data = AugmentedDataset([named], _in_place)
    assert [data[0]["x"].tolist() for _ in range(2)] == [[2, 2]] * 2 and named["x"].tolist() == [1, 1]
