"""Parts of data sets and loaders by themselves, at the sizes where they choose."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from types import SimpleNamespace

import image_files
import numpy as np
import pytest

import dbrdist
from dbrdist import iterators
from dbrdist.datasets import (
    augment,
    base,
    columns,
    convert,
    folder,
    images,
    index,
    index_format,
    memory,
    order,
    pickled,
    prefetch,
    scan,
    tables,
    tar,
    transforms,
    unpickle,
    workers,
    zipped,
)
from tests.each import each


@each(start=[-1, 0, 3, 7], stop=[-1, 0, 3, 7], step=[-2, -1, 1, 3])
def test_a_range_of_rows_is_the_slice_with_the_same_rows(start, stop, step):
    rows = range(8)[start:stop:step]
    found = tables._plain(rows)
    assert isinstance(found, slice) and list(range(8))[found] == list(rows)
    assert tables._plain(np.array([3, 1])) == [3, 1]


def test_examples_of_a_table_are_counted_from_both_ends():
    table = columns.from_data(("letter", list("abc")))
    values = [table.get_example(i) for i in range(-3, 3)]
    assert values[:3] == values[3:] and len({str(v) for v in values}) == 3
    for i in (-4, 3):
        with pytest.raises(IndexError, match="expected an index below 3"):
            table.get_example(i)


def test_what_a_transform_returns_is_seen_from_one_example():
    calls = []

    def double(value):
        calls.append(value)
        return {"twice": 2 * value}

    table = columns.from_data(("value", [5, 6, 7])).transform(("twice",), double)
    assert table.mode is dict and calls == [5]


def test_pickled_examples_are_counted_from_both_ends():
    file = io.BytesIO()
    writer = pickled.PickleDatasetWriter(file)
    for letter in "abc":
        writer.write(letter)
    data = pickled.PickleDataset(io.BytesIO(file.getvalue()))
    assert [data.get_example(i) for i in range(-3, 3)] == list("abcabc")
    for i in (-4, 3):
        with pytest.raises(IndexError, match="expected an index below 3"):
            data.get_example(i)


# ---- images


def test_parts_of_a_line_of_pixels_are_drawn():
    crop, rng = transforms.RandomResizedCrop(2, (0.1, 0.5), (2.0, 8.0)), np.random.default_rng(0)
    for shape, axis in (((1, 40), 1), ((40, 1), 0)):
        crop.ratio = (2.0, 40.0) if axis else (1 / 40, 0.5)
        found = [crop.window(*shape, rng) for _ in range(30)]
        assert all(w[3 - axis] == 1 and w[2 + axis] > 0 for w in found)
        assert len({w[axis] for w in found}) > 5


@each(
    **{"num_ops, magnitude, holds": [(0, 0, True), (1, 30, True), (-1, 9, False), (2, -0.1, False), (2, 30.1, False)]}
)
def test_operations_and_magnitudes_of_randaugment(num_ops, magnitude, holds):
    if holds:
        augment.RandAugment(num_ops, magnitude)
    else:
        with pytest.raises(ValueError, match="a magnitude from 0 to 30"):
            augment.RandAugment(num_ops, magnitude)


@each(name=["translate_x", "translate_y"], sign=[1, -1])
def test_images_are_moved_by_150_of_331_parts_at_most(name, sign):
    line = np.arange(1, 332, dtype=np.uint16) % 251 + 1
    image = line.astype(np.uint8)[None, :, None]
    if name == "translate_y":
        image = image.transpose(1, 0, 2)
    moved = augment.OPERATIONS[name](image, 1.0, sign, 0).ravel()
    line = image.ravel()
    kept, given = (moved[:-150], line[150:]) if sign > 0 else (moved[150:], line[:-150])
    np.testing.assert_array_equal(kept, given)
    assert not (moved[-150:] if sign > 0 else moved[:150]).any()


def test_a_damaged_image_is_named(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8\xff no image")
    with pytest.raises(folder.CorruptExampleError, match=f"corrupt image file {path}"):
        folder.read_image(path)
    with pytest.raises(folder.CorruptExampleError, match=r"expected a readable image file: .*b\.jpg"):
        folder.read_image(tmp_path / "b.jpg")


def test_sizes_of_images_in_shards_fit_their_column():
    assert np.dtype(dict(index_format.IN_SHARDS)["sizes"]).itemsize == 4
    assert np.iinfo("u4").max == index_format.MAX_IMAGE_BYTES


# ---- memory of batches


def test_images_that_follow_each_other_are_one_array_without_a_copy():
    reused = memory.Reused()
    whole = reused.fresh((6, 2, 2, 3), np.uint8)
    whole[...] = np.arange(whole.size).reshape(whole.shape)
    parts = [whole[:2], whole[2:3], whole[3:]]
    found = reused.concatenated(parts)
    assert np.shares_memory(found, whole) and found.shape == whole.shape
    for others in (
        [parts[0], parts[2]],
        [parts[1], parts[0]],
        [whole[:2].copy(), parts[1]],
        [parts[0], whole[2:3].copy()],
    ):
        found = reused.concatenated(others)
        assert not np.shares_memory(found, whole)
        np.testing.assert_array_equal(found, np.concatenate(others))
    foreign = np.ones((4, 2, 2, 3), np.uint8)
    assert not np.shares_memory(reused.concatenated([foreign[:1], foreign[1:]]), foreign)


def test_rows_of_a_canvas_are_given_out_until_they_end():
    reused, canvas = memory.Reused(), memory.Canvas(7)
    with reused.on(canvas, 2, 3):
        assert reused.begun(1) is None  # nobody has said what an image is like
        first = reused.empty((2, 4, 4, 3), np.uint8)
        assert reused.begun(2) is None
        last = reused.begun(1)
        assert reused.begun(1) is None
        assert not np.shares_memory(reused.empty((1, 4, 4, 3), np.uint8), first.base)
    first[...], last[...] = 5, 6
    whole = canvas.rows(0, (7, 4, 4, 3), np.uint8)
    assert [set(row.ravel().tolist()) for row in whole[2:5]] == [{5}, {5}, {6}]
    assert canvas.rows(0, (1, 4, 4, 4), np.uint8) is canvas.rows(0, (1, 4, 4, 3), np.uint16) is None
    assert reused.begun(1) is None  # this thread has no canvas any more


# ---- orders and loaders


@each(**{"n, dtype": [(3, "int64"), ((1 << 31) - 1, "int32"), (1 << 31, "int64"), (1 << 33, "int64")]})
def test_positions_of_many_examples_are_of_the_smaller_type_that_holds_them(n, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "permutation", lambda seed, epoch, n, dtype: np.dtype(dtype).name)
        assert order.ShuffleOrderSampler(7).order(0, n) == dtype


@each(
    **{"num_samples, num_threads, size": [
        (1, 1, 4), (8, 1, 4), (9, 1, 6), (64, 4, 8), (65, 4, 10), (72, 4, 10), (512, 8, 32), (10_000, 8, 32),
        (100, 16, 4),
    ]}
)  # fmt: skip
def test_threads_take_half_of_their_share_at_a_time(num_samples, num_threads, size):
    assert prefetch._share_size(num_samples, num_threads) == size


@each(**{"path, is_kept": [("/nowhere/<stdin>", False), (__file__, True), (None, None)]})
def test_a_loader_is_told_of_a_script_that_is_a_file(path, is_kept):
    given = {"authkey": b"key", "name": "x"} | ({} if path is None else {"init_main_from_path": path})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.spawn, "get_preparation_data", lambda name: given)
        found = workers._preparation()
    assert found.get("init_main_from_path") == (path if is_kept else None) and found["authkey"] == b"key"


def test_rows_of_an_array_in_any_order_are_taken():
    rows = np.arange(24).reshape(4, 6)
    for a in (rows, np.asfortranarray(rows), rows[:, ::2]):
        np.testing.assert_array_equal(base.take(a, np.array([2, 0, 2])), [list(a[i]) for i in (2, 0, 2)])


def test_a_batch_of_one_array_has_a_length():
    rows = np.arange(6).reshape(3, 2)
    for arrays in (rows, (rows,), (rows, rows), {"x": rows}):
        assert len(base.Batch(arrays)) == 3


def test_a_plan_begins_at_the_first_example():
    asked = []

    def sampler(current, position):
        asked.append((list(current), position))
        return current[::-1]

    plan = order.Plan(4, 3, True, "wrap", sampler)
    state = plan.first()
    assert asked == [([0, 1, 2, 3], 0)]
    assert state[:3] == (0, 0, False) and state.order.tolist() == [3, 2, 1, 0] and state[4:] == (-1, -1)
    state, step = plan.advance(plan.advance(state)[0])
    assert asked[1:] == [([3, 2, 1, 0], 3)]
    assert [(epoch, list(indices)) for epoch, indices in step.pieces] == [(0, [0]), (1, [0, 1])]
    assert state[:3] == (1, 2, True) and state[4:] == (0, 3)
    in_order = order.Plan(4, 2, True, "wrap", None).first()
    assert in_order == (0, 0, False, None, -1, -1)


def test_a_sampler_that_is_called_permutes_the_order_that_it_is_given():
    sampler, given = order.ShuffleOrderSampler(5), np.array([10, 11, 12, 13, 14, 15])
    for epoch in range(3):
        assert sampler(given, 0).tolist() == given[order.ShuffleOrderSampler(5).order(epoch, 6)].tolist()


def test_an_index_lies_in_memory_of_its_own_where_there_is_no_other(tmp_path, monkeypatch):
    image_files.class_folders(tmp_path / "images")
    one = index.open_images(tmp_path / "images")
    monkeypatch.delattr(index.os, "memfd_create")
    other = index.open_images(tmp_path / "images")
    assert other.classes == one.classes and other.labels.tolist() == one.labels.tolist() and len(one)
    assert [other.path(i) for i in range(len(other))] == [one.path(i) for i in range(len(one))]
    block = index.in_memory(one.block(), "elsewhere")
    assert block.classes == one.classes and block.root == one.root and len(block) == len(one)


def test_a_list_is_cut_in_one_go():
    class Rows(list):
        def __getitem__(self, key):
            asked.append(key)
            return super().__getitem__(key)

    asked = []
    rows = Rows("abcde")
    column = columns._Column("letter", rows)
    assert column._values(None) is rows and asked == []
    assert column._values(slice(1, 4, 2)) == ["b", "d"] and asked == [slice(1, 4, 2)]
    assert column._values([3, -1]) == ["d", "e"] and len(asked) == 3


@each(n=[0, 1, 8, 9, 10, 13])
def test_ten_classes_are_named_at_most(n):
    names = [f"class-{i:02}" for i in range(n)]
    with pytest.raises(ValueError, match="the same class folders in one and in two") as caught:
        folder.check_same_classes([*names, "both", "last"], ["both"], "one", "two")
    shown = [*names, "last"]
    words = ", ".join(shown[:10]) + (f" and {n - 9} more" if n > 9 else "")
    assert f"only in the first: {words}; only in the second: none; labels" in str(caught.value)
    with pytest.raises(ValueError, match="only in the first: none; only in the second: other;"):
        folder.check_same_classes(["a"], ["other", "a"], "one", "two")


def test_the_first_sampler_has_the_seed_of_the_run():
    state = dbrdist.random.get_state()
    dbrdist.random.set_seed(7)
    assert order.ShuffleOrderSampler().seed == 7 != order.ShuffleOrderSampler().seed
    dbrdist.random.set_state(state)


@each(ready=[False, True])
def test_a_copy_of_an_iterator_has_threads_of_its_own(ready):
    with iterators.MultithreadIterator(list(range(10)), 2, shuffle=False, n_threads=2) as it:
        if ready:
            next(it)
        other = copy.copy(it)
        assert other._pool is None and len(other._ahead) == 0 and other.skipped is not it.skipped
        found = [next(other) for _ in range(3)]
        assert found == [next(it) for _ in range(3)] and other._pool is not it._pool
        other.finalize()
        assert len(next(it)) == 2


def test_lists_of_images_have_a_length(tmp_path):
    assert len(folder.LabeledImageDataset([("a.png", 1), ("b.png", 0)])) == 2
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in "abc":
            archive.writestr(f"{name}.png", b"")
    (tmp_path / "labels").write_text("c.png 1\na.png 0\n")
    assert len(zipped.LabeledZippedImageDataset(tmp_path / "a.zip", tmp_path / "labels")) == 2


def test_a_file_in_an_archive_has_a_limit_of_bytes(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", b"12345")
    data = zipped.ZippedImageDataset(tmp_path / "a.zip")
    for limit, words in ((5, "neither JPEG nor PNG"), (4, "but it claims 5 bytes")):
        monkeypatch.setattr(zipped, "_MAX_BYTES", limit)
        with pytest.raises(folder.CorruptExampleError, match=words):
            data[0]


@each(
    **{"text, label": [
        (b"0", 0), (b" 17\n", 17), (b"999999", 999_999), (b"1000000", None), (b"", None), (b"-1", None), (b"1.5", None),
        (b"7" + b" " * 63, 7), (b"7" + b" " * 64, None), (b" " * 64 + b"7", None), (b"x", None), (b"0" * 63 + b"7", 7),
    ]}
)  # fmt: skip
def test_the_class_of_an_image_is_a_number_below_a_million(text, label, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"before" + text + b"5 behind")
    member = tar.Member(b"a.cls", 6, len(text), True)
    if label is None:
        with pytest.raises(folder.DatasetError, match=r"a class from 0 to 999,999 in 'a.cls', got b'.{0,20}'$"):
            scan._label(str(path), member)
    else:
        assert scan._label(str(path), member) == label


def test_a_pickle_whose_frame_ends_with_the_file_and_not_with_a_stop():
    frame = b"\x80\x04\x95" + (5).to_bytes(8, "little") + b"\x8c\3abc"
    with pytest.raises(ValueError, match=r"cut short, at example 0 \(byte 0\): the file ends after 16 bytes"):
        pickled.PickleDataset(io.BytesIO(frame))
    long = b"\x80\x04X" + (3).to_bytes(4, "little") + b"abc"
    with pytest.raises(ValueError, match=r"cut short, at example 0 \(byte 0\): the file ends after 10 bytes"):
        pickled.PickleDataset(io.BytesIO(long))
    assert pickled.PickleDataset(io.BytesIO(long + b"."))[0] == "abc"


@each(is_there=[False, True])
def test_images_are_resized_by_the_library_that_is_there(is_there):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images.importlib.util, "find_spec", lambda name: (name == "cv2" and is_there) or None)
        assert images.resizer.__wrapped__() == ("opencv" if is_there else "numpy")


class Own:
    """A class of the program's."""


def test_classes_of_the_program_are_refused_unless_they_are_asked_for():
    data = pickle.dumps([Own()])
    with pytest.raises(unpickle.RefusedPickle, match=r"it refers to \S+\.Own, which plain data does not need"):
        unpickle.DataUnpickler(io.BytesIO(data), frozenset()).load()
    for allowed, classes in ((frozenset(), True), (frozenset({(__name__, "Own")}), False)):
        assert type(unpickle.DataUnpickler(io.BytesIO(data), allowed, classes).load()[0]) is Own


@each(code=[b"B", b"X", b"\x8e", b"\x96", b"\x8d"])
def test_long_values_of_a_pickle_are_passed_over_by_their_length(code):
    """Those of 4 GB and more, too: the second half of the codes says its length in 8 bytes."""
    asked, plain = [], pickled._end_by_operations

    def note(reader, at):
        asked.append(at)
        return plain(reader, at)

    width = 4 if code in b"BX" else 8
    one = b"\x80\x05" + code + (300).to_bytes(width, "little") + b"." * 300 + b"."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "_end_by_operations", note)
        assert list(pickled._positions(io.BytesIO(one * 3))) == [0, len(one), 2 * len(one)]
    assert asked == [k * len(one) - 1 for k in (1, 2, 3)]
    assert len(pickled.PickleDataset(io.BytesIO(one))[0]) == 300


def test_pickles_without_a_frame():
    """So short that they have none, since protocol 4."""
    examples = [set(), None, True, (), [], {}, 0, 5, b"", frozenset(), "", 1 << 300]
    for protocol in (4, 5):
        file = io.BytesIO(b"".join(pickle.dumps(example, protocol) for example in examples))
        assert list(pickled.PickleDataset(file)) == examples


def test_batches_are_sent_where_a_device_is_named(monkeypatch):
    monkeypatch.setattr(convert.backend, "get_device", lambda name: SimpleNamespace(send=lambda x: (name, x.tolist())))
    x = np.arange(2)
    assert convert.to_device(None, x) is x and convert.to_device("there", x) == ("there", [0, 1])
    rows = [(1, 2), (3, 4)]
    assert convert.concat_examples(rows, "a")[0][1] == [1, 3] and convert.concat_examples(rows)[1].tolist() == [2, 4]


def test_a_writer_is_flushed_where_it_can_be():
    calls = []
    with_flush = SimpleNamespace(write=calls.append, flush=lambda: calls.append("flush"))
    pickled.PickleDatasetWriter(with_flush).flush()
    pickled.PickleDatasetWriter(SimpleNamespace(write=calls.append)).flush()
    assert calls == ["flush"] and images.MAX_PIXELS == 100_000_000
