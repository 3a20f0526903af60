"""Tests of dbrdist.datasets.loading.base."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from dbrdist import dataset as D
from dbrdist import iterators
from dbrdist.core.array.backend import CpuDevice
from dbrdist.datasets import AugmentedDataset, Compose, DatasetMixin, DictDataset, ToCHW, TupleDataset
from dbrdist.datasets.image import mixing
from dbrdist.datasets.loading import base
from dbrdist.datasets.loading.base import Batch, get_batch, join


def test_memory_of_others_is_copied():
    whole = np.arange(8 * 12, dtype=np.uint8).reshape(8, 2, 2, 3)
    joined = join([Batch((whole[:4], np.arange(4))), Batch((whole[4:], np.arange(4)))])
    np.testing.assert_array_equal(joined.arrays[0], whole)
    assert not np.shares_memory(joined.arrays[0], whole)


def test_bases_name_what_is_to_be_defined():
    class Nothing(D.DatasetMixin): ...

    class NoMix(mixing.Mixing): ...

    for call, words in (
        (lambda: len(Nothing()), "Nothing must define __len__"),
        (lambda: Nothing().get_example(0), "Nothing must define get_example(i)"),
        (lambda: Nothing()[0], "Nothing must define get_example(i)"),
        (lambda: D.Converter()([], None), "Converter must define __call__(batch, device)"),
        (lambda: iterators.OrderSampler()(None, 0), "OrderSampler must define __call__(current_order, current_pos"),
        (lambda: next(D.Iterator()), "Iterator must define __next__"),
        (lambda: D.Iterator().next(), "Iterator must define __next__"),
        (lambda: NoMix().mix(None, None, None, None), "NoMix must define mix(out, other, rn"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{re.escape(words)}"):
            call()


def test_batches_are_read_sliced_pickled_and_shown():
    channels_last = np.arange(24, dtype="f").reshape(2, 2, 2, 3).transpose(0, 3, 1, 2)
    plain = np.arange(24, dtype="f").reshape(2, 3, 2, 2)
    t = np.array([4, 5])
    for arrays in ((channels_last, t), {"x": plain, "t": t}, channels_last, t):
        batch = base.Batch(arrays)
        again = pickle.loads(pickle.dumps(batch))
        for each_of in (batch, again):
            got, wanted = each_of.arrays, arrays
            if isinstance(arrays, tuple):
                got, wanted = dict(enumerate(got)), dict(enumerate(wanted))
            elif not isinstance(arrays, dict):
                got, wanted = {0: got}, {0: wanted}
            assert type(each_of.arrays) is type(arrays) and list(got) == list(wanted)
            for key, a in wanted.items():
                np.testing.assert_array_equal(got[key], a)
                assert got[key].strides == a.strides
            assert len(each_of) == 2 and len(each_of[:1]) == 1 and len(each_of[2:]) == 0
        for index in (2, -3):
            with pytest.raises(IndexError, match=f"expected an index below 2, the number of examples, got {index}"):
                batch[index]
        batch[-2], batch[1]
        sent = batch.to_device(CpuDevice())
        assert type(sent) is type(arrays)
    assert repr(base.Batch((plain, t))) == "<Batch of 2: ('float32(2, 3, 2, 2)', 'int64(2,)')>"


def test_batches_are_joined_where_they_are_alike():
    one, two = base.Batch((np.zeros((2, 3)), np.zeros(2))), base.Batch((np.ones((1, 3)), np.ones(1)))
    assert base.join([one]) is one
    joined = base.join([one, two])
    assert joined.arrays[0].tolist() == [[0] * 3, [0] * 3, [1] * 3] and joined.arrays[1].tolist() == [0, 0, 1]
    for other in (
        base.Batch((np.ones((1, 4)), np.ones(1))), base.Batch((np.ones((1, 3), "f"), np.ones(1))),
        base.Batch(np.ones((1, 3))), [(np.ones(3), 1.0)], base.Batch((np.ones((1, 3)), np.ones(1)), lambda a, t: a),
    ):  # fmt: skip
        assert base.join([one, other]) is None


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


def test_a_batch_reads_like_a_list_of_examples():
    batch = Batch((np.arange(6).reshape(3, 2), np.array([7, 8, 9])))
    assert len(batch) == 3
    assert [(x.tolist(), int(y)) for x, y in batch] == [([0, 1], 7), ([2, 3], 8), ([4, 5], 9)]
    assert int(batch[-1][1]) == 9
    assert len(batch[1:]) == 2
    with pytest.raises(IndexError, match="below 3, the number of examples, got 3"):
        batch[3]


def test_rows_of_an_array_in_any_order_are_taken():
    rows = np.arange(24).reshape(4, 6)
    for a in (rows, np.asfortranarray(rows), rows[:, ::2]):
        np.testing.assert_array_equal(base.take(a, np.array([2, 0, 2])), [list(a[i]) for i in (2, 0, 2)])


def test_a_batch_of_one_array_has_a_length():
    rows = np.arange(6).reshape(3, 2)
    for arrays in (rows, (rows,), (rows, rows), {"x": rows}):
        assert len(base.Batch(arrays)) == 3


class Refilled:
    """Examples of which each takes the place of the one before."""

    def __init__(self, kind):
        self.kind, self.row, self.held = kind, np.zeros(3, np.float32), {}

    def __len__(self):
        return 5

    def __getitem__(self, i):
        if i == 4:
            raise base.SkipExample("four")
        self.row[:] = i
        if self.kind == "dict":
            self.held["x"] = np.full(3, i, np.float32)
            return self.held
        return {"array": self.row, "tuple": (self.row, i), "view": self.row[:2], "named": {"x": self.row}}[self.kind]


@pytest.mark.parametrize("kind", ["array", "tuple", "view", "named", "dict"])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: TupleDataset(data, range(5))])
def test_examples_that_take_each_others_place_are_told_apart(kind, wrap):
    skipped = []
    found = base.get_batch(wrap(Refilled(kind)), np.array([3, 4, 0, 2]), 0, 0, skipped)
    assert "".join(re.findall(r"(?<=array\(\[)\d", repr(found))) == "302" and skipped == ["four"]


def test_labels_that_take_each_others_place_are_told_apart_beside_transforms():
    images, label = np.zeros((5, 4, 4, 1), np.float32), np.zeros(1, np.float32)

    class Relabelled(Refilled):
        def __getitem__(self, i):
            label[:] = i
            return images[i], label

    data = AugmentedDataset(Relabelled("array"), Compose([ToCHW()]))
    assert get_batch(data, np.array([3, 0, 2]), 0, 0, []).arrays[1].ravel().tolist() == [3, 0, 2]


def test_examples_of_memory_of_their_own_are_given_as_they_are():
    rows = np.arange(12.0).reshape(4, 3)
    for data in (list(rows), [(row, 1) for row in rows], [rows[:2], rows[1:3]], [{"x": row} for row in rows]):
        found = base.get_batch(data, np.array([1, 0]), 0, 0, [])
        assert found[0] is data[1] and found[1] is data[0]


def test_batches_are_added_like_lists_and_take_lists_of_indices():
    x, y = np.arange(6).reshape(3, 2), np.array([7, 8, 9])
    batch = Batch((x, y))
    for both in (batch + batch, batch + list(batch), list(batch) + batch):
        assert [(a.tolist(), int(b)) for a, b in both] == [([0, 1], 7), ([2, 3], 8), ([4, 5], 9)] * 2
    for index in ([2, 0], np.array([2, 0]), [True, False, True], np.array([True, False, True])):
        part = batch[index]
        np.testing.assert_array_equal(part.arrays[0], x[index])
        np.testing.assert_array_equal(part.arrays[1], y[index])
    assert Batch(x, lambda a, dtype: a * 2)[[1]].arrays.tolist() == [[4, 6]]


def test_an_array_of_objects_is_like_a_list():
    """It was a batch of itself, so that arrays of several sizes were neither padded nor refused."""
    sizes = np.empty(3, object)
    sizes[:] = [np.ones(2), np.ones(3), np.ones(1)]
    wanted = [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    for data in (sizes, TupleDataset(sizes, np.arange(3)), TupleDataset(sizes), DictDataset(x=sizes)):
        batch = get_batch(data, np.arange(3), 0, 0, [])
        made = D.concat_examples(batch, padding=0)
        made = made["x"] if isinstance(made, dict) else made[0] if isinstance(made, tuple) else made
        assert made.tolist() == wanted and made.dtype == np.float64
        with pytest.raises(ValueError, match="examples of one shape"):
            D.concat_examples(batch)
