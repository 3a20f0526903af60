"""What lies just within and just outside of the conditions in which datasets, iterators and transforms choose."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re

import numpy as np
import pytest

import dbrdist
from dbrdist import dataset as D
from dbrdist import datasets, iterators
from dbrdist.core.backend import Device
from dbrdist.datasets import augment, base, convert, images, mixing, mnist, order, serial, tar, transforms
from dbrdist.errors import CheckpointError, DatasetError
from tests.each import each

IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


class Fixed:
    """Random numbers that are written down."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


# ---- bases ----------------------------------------------------------------------------------------------------------


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
        sent = batch.to_device(Device("numpy"))
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


# ---- converting -----------------------------------------------------------------------------------------------------


def test_examples_of_several_shapes_are_padded_entry_by_entry():
    short, long = np.array([1.0]), np.array([2.0, 3.0])
    for make, padding in ((dict, {"a": -1, "b": None}), (tuple, (-1, None)), (dict, -1), (tuple, -1)):
        examples = [make({"a": x, "b": 7}.items()) if make is dict else (x, 7) for x in (short, long)]
        y = dataset_arrays(D.concat_examples(examples, padding=padding))
        assert y[0].tolist() == [[1, -1], [2, 3]] and y[1].tolist() == [7, 7]
    for examples, where in (([(short,), (long,)], " in entry 0"), ([{"a": short}, {"a": long}], " in entry 'a'")):
        with pytest.raises(ValueError, match=rf"expected examples of one shape{where}, got \[\(1,\), \(2,\)\]"):
            D.concat_examples(examples)
    with pytest.raises(ValueError, match=r"expected examples of one shape, got"):
        D.concat_examples([short, long])
    assert D.concat_examples([short, long], padding=0).tolist() == [[1, 0], [2, 3]]
    assert D.concat_examples([[1], [2, 3]], padding=0).tolist() == [[1, 0], [2, 3]]
    for padding in (None, 0):  # arrays without axes
        y = D.concat_examples([np.array(1.5), np.array(2.0)], padding=padding)
        assert y.tolist() == [1.5, 2] and y.dtype == np.float64
    with pytest.raises(ValueError, match="expected at least one example to concatenate, got an empty list"):
        D.concat_examples([])


def dataset_arrays(found):
    return list(found.values()) if isinstance(found, dict) else list(found)


def test_converters_are_functions_with_devices():
    seen = []

    @D.converter()
    def convert_it(batch, device, *rest):
        """Words."""
        seen.append((device, rest))

    convert_it([1])
    convert_it([1], "@numpy", 3)
    assert seen == [(None, ()), (Device("numpy"), (3,))]
    assert convert_it.__name__ == "convert_it" and convert_it.__doc__ == "Words."
    assert pickle.loads(pickle.dumps(D.concat_examples)) is D.concat_examples
    named = pickle.loads(pickle.dumps(convert._FunctionConverter(len)))
    assert named.function is len
    with pytest.raises(TypeError, match=r"expected a function \(batch, device\) to convert with, got 3"):
        D.converter()(3)
    x = np.ones(2)
    assert D.to_device(None, x) is x and D.to_device("@numpy", {"a": x})["a"] is x


# ---- iterators ------------------------------------------------------------------------------------------------------


REFUSED = {
    "expected at least one thread, got n_threads=0": lambda: iterators.MultithreadIterator([1], 1, n_threads=0),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got -1, 1 and None": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=-1)),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got 1, 0 and None": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=1, n_prefetch=0)),
    "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, got 1, 1 and 0": (
        lambda: iterators.MultiprocessIterator([1], 1, n_processes=1, maxtasksperchild=0)),
    "expected a batch size of at least 1, got 0": lambda: iterators.SerialIterator([1], 0),
    "expected a dataset with examples, got an empty one": lambda: iterators.SerialIterator([], 1),
    "expected a full batch with last='drop', got 1 examples for batches of 2": (
        lambda: iterators.SerialIterator([1], 2, last="drop")),
    "expected at least one example per rank, got 1 examples for 2 ranks": (
        lambda: iterators.SerialIterator([1], 2, rank=0, size=2)),
    "expected a global batch of at least one example per rank, got batch_size=1 for 2 ranks": (
        lambda: iterators.SerialIterator([1, 2], 1, rank=0, size=2)),
    "expected at least as many virtual workers as ranks, got virtual_workers=1 for 2 ranks": (
        lambda: serial.check_workers(1, 2, 4)),
    "expected a global batch of at least one example per virtual worker, got batch_size=1 for virtual_workers=2": (
        lambda: serial.check_workers(2, 2, 1)),
    "get_cross_validation_datasets got unknown arguments ['folds']": (
        lambda: datasets.get_cross_validation_datasets([1, 2], 2, folds=2)),
    "expected the number of folds, n_folds=...": lambda: datasets.get_cross_validation_datasets([1, 2]),
    "expected num_ops of at least 0 and a magnitude from 0 to": lambda: datasets.RandAugment(-1),
    "expected at least one way to mix and one class, got 1 ways and 0 classes": (
        lambda: datasets.MixedDataset([], [datasets.Mixup()], 0)),
    "expected at least one way to mix and one class, got 0 ways and 1 classes": (
        lambda: datasets.MixedDataset([], [], 1)),
    "expected a positive size or a pair (height, width), got (1, 2, 3)": lambda: transforms.CenterCrop((1, 2, 3)),
    "expected a positive size or a pair (height, width), got (0, 2)": lambda: transforms.CenterCrop((0, 2)),
    "expected a positive size or a pair (height, width), got (1.5, 2)": lambda: transforms.CenterCrop((1.5, 2)),
    "expected a positive size or a pair (height, width), got -1": lambda: transforms.CenterCrop(-1),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0, 1) and": (
        lambda: transforms.RandomResizedCrop(2, (0, 1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.5, 1.1) and": (
        lambda: transforms.RandomResizedCrop(2, (0.5, 1.1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.6, 0.5) and": (
        lambda: transforms.RandomResizedCrop(2, (0.6, 0.5))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.08, 1.0) and (0, 1)": (
        lambda: transforms.RandomResizedCrop(2, ratio=(0, 1))),
    "expected 0 < scale <= 1 and 0 < ratio, each (low, high), got (0.08, 1.0) and (2, 1)": (
        lambda: transforms.RandomResizedCrop(2, ratio=(2, 1))),
    "expected an image of at least 5x2 for CenterCrop, got 4x5": lambda: transforms.CenterCrop((5, 2))(IMAGE),
    "expected an image of at least 4x6 for CenterCrop, got 4x5": lambda: transforms.CenterCrop((4, 6))(IMAGE),
    "expected an image of at least 7x5 with padding 1 for RandomCrop, got 4x5": (
        lambda: transforms.RandomCrop((7, 5), 1).image(IMAGE, Fixed(0, 0))),
    "expected an image of at least 4x8 with padding 1 for RandomCrop, got 4x5": (
        lambda: transforms.RandomCrop((4, 8), 1).image(IMAGE, Fixed(0, 0))),
    "expected an image (H, W, C) of uint8 for RandAugment, got float32": (
        lambda: datasets.RandAugment(1).image(IMAGE.astype("f"), Fixed(0, 0))),
    "expected an image (H, W, C) of uint8 for RandAugment, got uint8 of (4, 5)": (
        lambda: datasets.RandAugment(1).image(IMAGE[..., 0], Fixed(0, 0))),
    "expected the method 'linear' or 'area', got 'cubic'": lambda: images.resize(IMAGE, 2, 2, "cubic"),
}  # fmt: skip


@pytest.mark.parametrize("block", range(3))
@each(words=lambda block: list(REFUSED)[block::3])
def test_refused(block, words):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(words)}"):
        REFUSED[words]()


def test_taken():
    serial.check_workers(2, 2, 2)
    assert next(iterators.SerialIterator([1], 1, last="drop", shuffle=False)) == [1]
    assert next(iterators.SerialIterator([1, 2], 2, rank=1, size=2, shuffle=False)) == [2]
    with iterators.MultithreadIterator([1, 2], 2, shuffle=False, n_threads=1) as iterator:
        assert next(iterator) == [1, 2]
    with iterators.MultiprocessIterator([1], 1, n_processes=1, n_prefetch=1, maxtasksperchild=1) as iterator:
        assert (iterator.n_processes, iterator.n_prefetch, iterator.maxtasksperchild) == (1, 1, 1)
    np.testing.assert_array_equal(datasets.RandAugment(0).image(IMAGE, Fixed()), IMAGE)
    np.testing.assert_array_equal(transforms.CenterCrop((4, 5))(IMAGE), IMAGE)
    np.testing.assert_array_equal(transforms.CenterCrop((3, 4))(IMAGE), IMAGE[:3, :4])
    np.testing.assert_array_equal(transforms.CenterCrop((2, 2))(IMAGE), IMAGE[1:3, 1:3])
    cropped = transforms.RandomCrop((6, 7), 1).image(IMAGE, Fixed(0.999, 0.999))
    np.testing.assert_array_equal(cropped, np.pad(IMAGE, ((1, 1), (1, 1), (0, 0))))
    for draw, top in ((0.0, 0), (0.49, 0), (0.5, 1), (0.999, 1)):
        np.testing.assert_array_equal(transforms.RandomCrop((3, 5)).image(IMAGE, Fixed(draw, 0)), IMAGE[top : top + 3])
    transforms.RandomResizedCrop(2, (1, 1), (1, 1))
    assert images.resize(IMAGE, 4, 5) is IMAGE


@each(part=["n_folds", "n_fold", "position"])
def test_folds_under_either_name(part):
    data = [10, 11, 12, 13, 14]
    folds = datasets.get_cross_validation_datasets(data, *([2] if part == "position" else []), **(
        {} if part == "position" else {part: 2}))  # fmt: skip
    assert [(list(a), list(b)) for a, b in folds] == [([12, 13, 14], [10, 11]), ([10, 11], [12, 13, 14])]
    ordered = datasets.get_cross_validation_datasets(data, 5, order=[4, 3, 2, 1, 0])
    assert [list(test) for _, test in ordered] == [[14], [13], [12], [11], [10]]
    for n in (0, 6):
        with pytest.raises(ValueError, match=str(n)):
            datasets.get_cross_validation_datasets(data, n)
    one, zero = (datasets.get_cross_validation_datasets_random(data, 5, seed) for seed in (1, 0))
    none = datasets.get_cross_validation_datasets_random(data, 5)
    assert [list(b) for _, b in none] == [list(b) for _, b in zero] != [list(b) for _, b in one]


def test_seeds_of_samplers_come_from_any_source_of_chance():
    ask = np.random.default_rng(3)
    sampler = iterators.ShuffleOrderSampler(np.random.default_rng(3))
    assert sampler.seed == int(ask.integers(2**63))
    state = np.random.RandomState(3)
    assert iterators.ShuffleOrderSampler(np.random.RandomState(3)).seed == int(state.randint(2**31))
    assert iterators.ShuffleOrderSampler(5).seed == 5
    dbrdist.random.set_seed(1)
    first, second = order.ShuffleOrderSampler(), order.ShuffleOrderSampler()
    assert first.seed != second.seed


def test_positions_of_saved_iterators_lie_within_an_epoch():
    saved = {"num_examples": 4, "seed": 0, "epoch": 1, "current_position": 0, "is_new_epoch": 0}

    class Saved(dict):
        is_loading = True

        def __call__(self, key, value):
            return self.get(key, value)

        def __getitem__(self, key):
            return self

    for position in (-1, 4):
        with pytest.raises(
            CheckpointError, match=f"expected a position below 4, the examples of an epoch, got {position}"
        ):
            iterators.SerialIterator([1, 2, 3, 4], 2).serialize(Saved({**saved, "current_position": position}))
    for position in (0, 3):
        iterator = iterators.SerialIterator([1, 2, 3, 4], 1, shuffle=False)
        iterator.serialize(Saved({**saved, "current_position": position}))
        assert next(iterator) == [position + 1] and iterator.repeat and iterator.last == "wrap"
    with pytest.raises(CheckpointError, match="expected a dataset of 5 examples"):
        iterators.SerialIterator([1, 2, 3, 4], 1).serialize(Saved({**saved, "num_examples": 5}))


# ---- mixing ---------------------------------------------------------------------------------------------------------


@each(
    case=[
        ([(IMAGE, 0), (IMAGE, 2)], 3, None),
        ([(IMAGE, 0), (IMAGE, 2)], 2, "expected labels from 0 to 1 to mix, got 0 to 2"),
        ([(IMAGE, -1), (IMAGE, 0)], 2, "expected labels from 0 to 1 to mix, got -1 to 0"),
        ([(IMAGE, 0, 1)], 3, "expected examples of (image, label) with images of one size to mix"),
        ([IMAGE], 3, "expected examples of (image, label) with images of one size to mix"),
        ([(IMAGE[0], 1)], 3, "expected examples of (image, label) with images of one size to mix"),
        ([(IMAGE, 1.0)], 3, "expected an integer label for each image to mix, got float64 of (1,)"),
        ([(IMAGE, np.array([1, 2]))], 3, "expected an integer label for each image to mix, got int64 of (1, 2)"),
    ]
)
def test_examples_that_can_be_mixed(case):
    examples, num_classes, words = case
    mixed = datasets.MixedDataset(examples, [datasets.Mixup()], num_classes)
    if words is None:
        assert len(mixed) == 2 and mixed[0][1].shape == (num_classes,)
    else:
        with pytest.raises(DatasetError, match=re.escape(words)):
            mixed[0]


# ---- files ----------------------------------------------------------------------------------------------------------


def idx(tmp_path, data, name="x"):
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def test_idx_files_have_the_length_that_they_claim(tmp_path, monkeypatch):
    head, body = bytes([0, 0, 8, 1]), bytes([1, 2, 3])
    whole = head + (3).to_bytes(4, "big") + body
    for data in (whole, gzip.compress(whole)):
        assert mnist.read_idx(idx(tmp_path, data), ()).tolist() == [1, 2, 3]
    assert mnist.read_idx(idx(tmp_path, head + bytes(4)), ()).tolist() == []
    for data in (whole[:-1], whole + b"x", head + bytes(3), head):
        with pytest.raises(ValueError, match=r"expected an idx file of \('N',\) bytes, but"):
            mnist.read_idx(idx(tmp_path, data), ())
    monkeypatch.setattr(mnist, "_MAX_BYTES", len(whole))
    assert mnist.read_idx(idx(tmp_path, whole), ()).tolist() == [1, 2, 3]
    monkeypatch.setattr(mnist, "_MAX_BYTES", len(whole) - 1)
    with pytest.raises(ValueError, match="expected an idx file of bytes with 1 axes"):
        mnist.read_idx(idx(tmp_path, whole), ())


def header(name=b"a", size=0, kind=b"0", magic=b"ustar\x0000", prefix=b"", number=None):
    field = b"%011o\0" % size if number is None else number
    made = bytearray(tar.BLOCK)
    for start, part in ((0, name), (124, field), (156, kind), (257, magic), (345, prefix)):
        made[start : start + len(part)] = part
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def padded(data):
    return data + bytes(-len(data) % tar.BLOCK)


def members(data):
    return [(m.name, m.offset, m.size, m.is_regular) for m in tar._members(io.BytesIO(data), len(data))]


END = bytes(2 * tar.BLOCK)


def test_members_of_tar_files():
    assert members(END) == []
    assert members(header(size=3) + padded(b"abc") + END) == [(b"a", 512, 3, True)]
    assert members(header(size=512) + bytes(512) + header(b"b") + END) == [
        (b"a", 512, 512, True),
        (b"b", 1536, 0, True),
    ]
    assert members(header(b"./././a") + END)[0][0] == b"a"
    assert members(header(b"folder/", kind=b"5") + END) == []
    assert members(header(prefix=b"in") + END)[0][0] == b"in/a"
    assert members(header(prefix=b"in", magic=b"ustar  \0") + END)[0][0] == b"a"
    assert members(header(size=0, number=b" " * 12) + END)[0][2] == 0
    assert members(header(number=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END)[0][2] == 3
    assert members(header(kind=b"2") + END) == [(b"a", 512, 0, False)]
    long = header(size=5, kind=b"L") + padded(b"long\0")
    assert members(long + header() + header(b"b") + END) == [(b"long", 1536, 0, True), (b"b", 2048, 0, True)]
    pax = b"12 path=new\n" + b"9 size=3\n"
    found = header(size=len(pax), kind=b"x") + padded(pax) + header() + padded(b"abc") + header(b"b") + END
    assert members(found) == [(b"new", 1536, 3, True), (b"b", 2560, 0, True)]


def test_damage_in_tar_files(monkeypatch):
    monkeypatch.setattr(tar, "_MAX_EXTRA_BYTES", 600)
    assert members(header(size=600, kind=b"L") + padded(b"n" * 600) + header() + END)[0][0] == b"n" * 600
    pax = [
        (b"8 size=x\n"[:8] + b"", "has"), (b"x size=3\n", "is damaged"), (b"99 size=3\n", "is damaged"),
        (b"1 size=3\n", "is damaged"), (b"17 GNU.sparse.a=1\n"[:18], "sparse|damaged"),
    ]  # fmt: skip
    for data, words in (
        (header(), "is cut short: it ends at byte 512 without an end mark"),
        (header() + bytes(511), "is cut short: it ends at byte 1,023"),
        (header(magic=b"posix") + END, "expected the header of a member at byte 0, found other data"),
        (header()[:100] + b"\1" + header()[101:] + END, "its checksum is wrong"),
        (header(number=b"x" * 11 + b"\0") + END, "has b'xxxxxxxxxxx.* for a number"),
        (header(size=601, kind=b"L") + padded(b"n" * 601) + END, "claims a name or header of 601 bytes"),
        (header(size=513, kind=b"L") + bytes(512), "claims a name or header of 513 bytes"),
        (header(size=4) + b"abc", "'a' claims 4 bytes, but the file ends after 3 of them"),
        (header(size=1), "'a' claims 1 bytes, but the file ends after 0 of them"),
        *((header(name) + END, "leads out of the archive") for name in (b"/a", b"../a", b"a/../b", b"a/..")),
        *((header(size=len(p), kind=b"x") + padded(p) + header() + END, words) for p, words in pax),
    ):
        with pytest.raises(tar._Damage, match=words):
            members(data)
    assert members(header(size=3) + padded(b"abc") + END)[0][1] == 512
    assert members(header(b"a..b/..c") + END)[0][0] == b"a..b/..c"


def test_images_have_a_limit_of_pixels(monkeypatch):
    pil = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pil.fromarray(IMAGE).save(file, "PNG")
    for limit in (20, 19):
        monkeypatch.setattr(images, "MAX_PIXELS", limit)
        if limit == 20:
            np.testing.assert_array_equal(images.decode(file.getvalue()), IMAGE)
        else:
            with pytest.raises(images.ImageDecodeError, match="it claims 4x5 pixels, more than the limit of 19"):
                images.decode(file.getvalue())


def test_a_cached_file_is_made_once(tmp_path):
    path, made = str(tmp_path / "deep" / "x.npz"), []

    def create(to):
        made.append(to)
        np.savez(to, a=np.arange(3))
        return "made"

    def load(path):
        return np.load(path)["a"].tolist()

    assert D.cache_or_load_file(path, create, load) == "made"
    assert D.cache_or_load_file(path, create, load) == [0, 1, 2] and len(made) == 1
    assert os.listdir(os.path.dirname(path)) == ["x.npz"]
    with pytest.raises(FileNotFoundError, match=r"expected the creator to write the file that it was given, y.npz"):
        D.cache_or_load_file(str(tmp_path / "y.npz"), lambda to: None, load)


@each(sign_draw=[0.0, 0.49999, 0.5, 0.999])
def test_operations_go_either_way_at_one_half(sign_draw):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "OPERATIONS", {"a": lambda image, strength, sign, fill: seen.append(sign) or image})
        datasets.RandAugment(1).image(IMAGE, Fixed(0.0, sign_draw))
    assert seen == [1 if sign_draw < 0.5 else -1]
