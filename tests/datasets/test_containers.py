"""Datasets of datasets, splits, npz files, and batches as arrays."""

import numpy as np
import pytest
from loader_examples import Noisy, Numbers

import dbrdist
from dbrdist.dataset import Converter
from dbrdist.datasets import (
    AugmentedDataset,
    ConcatenatedDataset,
    DatasetMixin,
    DictDataset,
    MixedDataset,
    Mixup,
    NpzDataset,
    SkipExample,
    SubDataset,
    TransformDataset,
    TupleDataset,
    get_cross_validation_datasets,
    get_cross_validation_datasets_random,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)
from dbrdist.datasets.base import get_batch
from dbrdist.datasets.convert import concat_examples, converter, to_device


class Squares(DatasetMixin):
    def __len__(self):
        return 5

    def get_example(self, i):
        if not -5 <= i < 5:
            raise IndexError
        return i * i


def test_mixin_adds_slices_and_lists():
    data = Squares()
    assert data[3] == 9
    assert data[1:4] == [1, 4, 9]
    assert data[::-2] == [16, 4, 0]
    assert data[[4, 0]] == data[np.array([4, 0])] == [16, 0]
    assert list(data) == [0, 1, 4, 9, 16]


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
    assert [len(test) for _, test in folds] == [3, 4, 4]
    assert sorted(x for _, test in folds for x in test) == list(range(11))
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(11))


def test_one_part_is_the_whole():
    assert [list(part) for part in split_dataset_n([1, 2, 3], 1)] == [[1, 2, 3]]
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


def test_concat_examples_stacks_tuples_dictionaries_and_bare_arrays():
    x, y = concat_examples([(np.array([1, 2]), 1), (np.array([3, 4]), 2)])
    assert (x.tolist(), y.tolist()) == ([[1, 2], [3, 4]], [1, 2])
    assert concat_examples([{"a": 1.5}, {"a": 2.5}])["a"].tolist() == [1.5, 2.5]
    assert concat_examples([np.float32(1), np.float32(2)]).dtype == np.float32
    with pytest.raises(ValueError, match="at least one example to concatenate"):
        concat_examples([])


def test_concat_examples_pads():
    batch = [(np.array([1, 2]), np.array([0])), (np.array([3]), np.array([])), (np.array([]), np.array([2]))]
    x, y = concat_examples(batch, padding=(100, 200))
    assert (x.tolist(), y.tolist()) == ([[1, 2], [3, 100], [100, 100]], [[0], [200], [2]])
    assert concat_examples([np.ones((1, 2)), np.ones((2, 1))], padding=0).tolist() == [
        [[1, 1], [0, 0]],
        [[1, 0], [1, 0]],
    ]
    with pytest.raises(ValueError, match=r"one shape in entry 0, got \[\(1,\), \(2,\)\]; .* padding="):
        concat_examples([(np.ones(2),), (np.ones(1),)])


def test_images_become_channels_last_batches():
    images = [np.random.default_rng(i).random((3, 4, 5)) for i in range(6)]
    x = concat_examples(images)
    assert np.array_equal(x, np.stack(images))
    assert x.transpose(0, 2, 3, 1).flags.c_contiguous


def test_converters_see_devices():
    seen = []

    @converter()
    def mine(batch, device):
        seen.append(device)
        return batch

    assert isinstance(mine, Converter)
    mine([1], -1)
    mine([1], device="@numpy")
    mine([1])
    assert seen == [dbrdist.get_device("@numpy"), dbrdist.get_device(-1), None]
    x = np.arange(3)
    assert to_device(None, x) is x and to_device(-1, x) is x
    with pytest.raises(TypeError, match="expected a function"):
        converter()(3)


# ---- npz ------------------------------------------------------------------------------------------------------------


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(12.0).reshape(4, 3), y=np.arange(4))
    data = NpzDataset(path, shape=(3,))
    image, label = data[2]
    assert (len(data), image.tolist(), image.dtype, label, label.dtype) == (4, [6, 7, 8], np.float32, 2, np.int32)
    assert NpzDataset(path, y=None)[1][0].tolist() == [3, 4, 5]
    assert NpzDataset(path, x="y", y="x", dtype=np.float64)[1][1].dtype == np.float64


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({"x": np.ones(3)}, {}, KeyError, r"the keys \['x', 'y'\] in .*data.npz, which has \['x'\]"),
        ({"x": np.ones(3), "y": np.ones(2)}, {}, ValueError, "one length in .*, got {'x': 3, 'y': 2}"),
        (
            {"x": np.ones((3, 2)), "y": np.ones(3)},
            {"shape": (3,)},
            ValueError,
            r"shape \(3,\) under 'x' in .*, got \(2,\)",
        ),
        ({"x": np.array(["a"]), "y": np.ones(1)}, {}, ValueError, "expected numbers .* under 'x'"),
        ({"x": np.float32(1), "y": np.ones(1)}, {}, ValueError, r"under 'x' in .*, got float32 of \(\)"),
        ({"x": np.array([None]), "y": np.ones(1)}, {}, ValueError, "array of numbers under 'x' in .*: Object arrays"),
    ],
)
def test_npz_files_that_do_not_fit_are_refused(tmp_path, arrays, options, error, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(error, match=message):
        NpzDataset(tmp_path / "data.npz", **options)


def test_files_that_are_no_npz_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    np.save(tmp_path / "data.npy", np.ones(3))
    np.savez(path, x=np.ones(300), y=np.ones(300))
    path.write_bytes(path.read_bytes()[:500])
    for name in ("data.npz", "data.npy"):
        with pytest.raises(ValueError, match=rf"expected an \.npz file.*{name}"):
            NpzDataset(tmp_path / name)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected an \.npz file"):
        NpzDataset(path)
    with pytest.raises(FileNotFoundError):
        NpzDataset(tmp_path / "nowhere.npz")


def test_batches_of_arrays_in_any_order_of_memory_are_copies_of_their_rows(tmp_path):
    plain = np.arange(120, dtype=np.int16).reshape(10, 3, 2, 2)
    np.save(tmp_path / "x.npy", plain)
    channels_last = np.ascontiguousarray(plain.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    arrays = (plain, channels_last, np.repeat(plain, 2, 0)[::2], np.load(tmp_path / "x.npy", mmap_mode="r"))
    for indices in ([3, 0, 3], [9], []):
        rows = np.array(indices, np.int64)
        for batch in (TupleDataset(*arrays).get_batch(rows, 0, 0, []), *[get_batch(a, rows, 0, 0, []) for a in arrays]):
            got = batch.arrays if isinstance(batch.arrays, tuple) else (batch.arrays,)
            for array in got:
                assert array.tolist() == [plain.tolist()[i] for i in indices]
                assert not any(np.shares_memory(array, a) for a in arrays)
    with pytest.raises(IndexError):
        TupleDataset(plain).get_batch(np.array([10]), 0, 0, [])
