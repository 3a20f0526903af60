"""Tests of dbrdist.datasets.loading.convert."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import dataset as D
from dbrdist.core.array import backend
from dbrdist.core.array.backend import CpuDevice
from dbrdist.dataset import Converter, tabular
from dbrdist.datasets.image.mixing import Mixup
from dbrdist.datasets.image.transforms import RandomHorizontalFlip, transform_batch
from dbrdist.datasets.loading import convert
from dbrdist.datasets.loading.convert import concat_examples, converter, to_device
from tests.each import each


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
    assert seen == [(None, ()), (CpuDevice(), (3,))]
    assert convert_it.__name__ == "convert_it" and convert_it.__doc__ == "Words."
    assert pickle.loads(pickle.dumps(D.concat_examples)) is D.concat_examples
    named = pickle.loads(pickle.dumps(convert._FunctionConverter(len)))
    assert named.function is len
    with pytest.raises(TypeError, match=r"expected a function \(batch, device\) to convert with, got 3"):
        D.converter()(3)
    x = np.ones(2)
    assert D.to_device(None, x) is x and D.to_device("@numpy", {"a": x})["a"] is x


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


def test_batches_are_sent_where_a_device_is_named(monkeypatch):
    monkeypatch.setattr(convert.backend, "get_device", lambda name: SimpleNamespace(send=lambda x: (name, x.tolist())))
    x = np.arange(2)
    assert convert.to_device(None, x) is x and convert.to_device("there", x) == ("there", [0, 1])
    rows = [(1, 2), (3, 4)]
    assert convert.concat_examples(rows, "a")[0][1] == [1, 3] and convert.concat_examples(rows)[1].tolist() == [2, 4]


# ---- Batches of examples: which example comes first decides nothing ----


TYPES = ["bool", "uint8", "int8", "int16", "int64", "uint64", "float16", "float32", "float64", ">f4", ">i2"]


def values(dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-3, 300, 6)
    if np.dtype(dtype).kind in "bu":
        x = abs(x)
    return np.clip(x, *((-128, 127) if dtype == "int8" else (-300, 300))).astype(dtype)


@each(first=TYPES, second=TYPES)
def test_types_are_promoted_whichever_comes_first(first, second):
    a, b = values(first), values(second, 1)
    wanted = np.stack([a, b])
    found = concat_examples([a, b])
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(concat_examples([b, a]), np.stack([b, a]))
    for wrap in (lambda x: (x, 1), lambda x: {"x": x}):
        batch = concat_examples([wrap(a), wrap(b)])
        np.testing.assert_array_equal(batch[0] if isinstance(batch, tuple) else batch["x"], wanted)
    padded = concat_examples([a[:2], b], padding=1)
    assert padded.dtype == wanted.dtype
    np.testing.assert_array_equal(padded[0, :2], a[:2].astype(wanted.dtype))
    np.testing.assert_array_equal(padded[0, 2:], np.ones(4))
    np.testing.assert_array_equal(padded[1], b.astype(wanted.dtype))


@each(order=list(itertools.permutations([np.array(2.5), 1, np.float32(0.5), True])))
def test_numbers_and_arrays_without_axes(order):
    np.testing.assert_array_equal(concat_examples(list(order)), np.asarray([float(v) for v in order]))


def test_images_keep_their_layout():
    images = [np.zeros((3, 4, 5), np.uint8), np.full((3, 4, 5), 0.5, np.float32)]
    found = concat_examples(images)
    assert found.dtype == np.float32
    assert backend.is_channels_last(found)
    assert found[1, 0, 0, 0] == 0.5


# Each pair in either order is refused with the same words.
APART = [
    ((1, 2), (1, 2, 3)),
    ({"x": 1}, {"x": 1, "y": 2}),
    ({"x": 1}, (1,)),
    (1, (1, 2)),
    (np.array("text"), np.array(1.5)),
    ("text", 1.5),
    (np.array(3, "M8[s]"), np.array(1.5)),
    (np.zeros(2), np.zeros((2, 2))),
]


@each(**{"one, other": APART}, padding=[None, 0])
def test_examples_that_do_not_go_together(one, other, padding):
    for batch in ([one, other], [other, one]):
        with pytest.raises(ValueError, match=r"expected examples .*got"):
            concat_examples(batch, padding=padding)


def test_lists_beside_tuples_are_tuples_whichever_comes_first():
    for batch in ([(1, 2.5), [3, 4.5]], [[1, 2.5], (3, 4.5)]):
        first, second = concat_examples(batch)
        np.testing.assert_array_equal(first, [1, 3])
        np.testing.assert_array_equal(second, [2.5, 4.5])


@each(**{"dtype, padding": [("uint8", -1), ("uint8", 256), ("int64", 0.5), ("int64", np.nan), ("bool", 2)]})
def test_a_padding_that_the_type_cannot_hold(dtype, padding):
    with pytest.raises(ValueError, match=r"expected a padding that .* holds"):
        concat_examples([np.zeros(2, dtype), np.zeros(1, dtype)], padding=padding)


@each(
    **{"dtype, padding": [("float32", np.nan), ("float32", -np.inf), ("float16", 0.1), ("int8", -128), ("int64", 3.0)]}
)
def test_a_padding_that_the_type_holds(dtype, padding):
    found = concat_examples([np.zeros(2, dtype), np.zeros(1, dtype)], padding=padding)
    np.testing.assert_array_equal(found[1, 1], np.asarray(padding).astype(dtype))


@each(padding=[(0,), (0, 1, 2)])
def test_paddings_for_other_entries(padding):
    with pytest.raises(ValueError, match="expected a padding for each entry"):
        concat_examples([(np.zeros(2), 1), (np.zeros(1), 1)], padding=padding)


@each(order=[(0, 1), (1, 0)])
def test_batches_of_transforms(order):
    images = [np.full((4, 4, 3), 200, np.uint8), np.full((4, 4, 3), 0.25, np.float32)]
    examples = [(k, (images[k], np.float32([0.5]) if k else np.int64([1 << 40]))) for k in order]
    found = concat_examples(transform_batch(RandomHorizontalFlip(0.5), examples, 2, 0, 0, []))
    for row, k in enumerate(order):
        np.testing.assert_array_equal(found[0][row], images[k])
        assert found[1][row] == examples[row][1][1]


def test_entries_that_one_example_of_a_transformed_batch_lacks():
    image = np.zeros((4, 4, 3), np.uint8)
    for rest in ([(1, 2), (3,)], [(3,), (1, 2)]):
        examples = [(k, (image, *labels)) for k, labels in enumerate(rest)]
        with pytest.raises(ValueError, match="same entries"):
            concat_examples(transform_batch(RandomHorizontalFlip(0.5), examples, 2, 0, 0, []))


@each(order=[(0, 1), (1, 0)])
def test_tables(order):
    columns = [np.array([1, 2]), np.array([0.5, 1.5])]
    table = tabular.from_data((("x", [columns[k] for k in order]),))
    np.testing.assert_array_equal(table.convert(table.fetch())[0], np.stack([columns[k] for k in order]))
    both = [tabular.from_data((("x", columns[k]),)) for k in order]
    joined = both[0].concat(both[1])
    np.testing.assert_array_equal(joined.convert(joined.fetch())[0], np.concatenate([columns[k] for k in order]))


@each(dtype=["int16", "int64", "uint8", "uint16", "float32", "float64"])
def test_mixup_of_every_type(dtype):
    a, b = (np.random.default_rng(k).integers(0, 200, (4, 4, 3)).astype(dtype) for k in range(2))
    out = a.copy()
    w = Mixup(alpha=5.0).mix(out, b, np.random.default_rng(3), (0, 1))
    exact = w * a.astype("d") + (1 - w) * b.astype("d")
    assert 0 < w < 1
    np.testing.assert_allclose(out, exact, atol=0.5 if np.dtype(dtype).kind in "iu" else 1e-4)


JOINS = ["concat", "stack", "vstack", "hstack", "dstack"]


@each(name=JOINS, types=list(itertools.permutations(["float16", "float32", "float64"], 2)))
def test_functions_that_join_arrays(name, types):
    xs = [np.random.default_rng(k).uniform(1, 2, (2, 3)).astype(t) for k, t in enumerate(types)]
    for arrays in (xs, xs[::-1]):
        found = getattr(F, name)(arrays).array
        assert found.dtype == np.result_type(*types), name
        assert {float(v) for v in np.ravel(found)} == {float(v) for x in arrays for v in np.ravel(x)}


@each(padding=[0.5, np.nan, 300])
def test_paddings_of_sequences_of_integers(padding):
    with pytest.raises(ValueError, match="padding"):
        F.pad_sequence([np.zeros(2, np.uint8), np.zeros(1, np.uint8)], padding=padding)


@each(example=[(np.ones(2), 1), {"a": np.ones(2)}, np.ones(2)], at=[1, 2])
def test_none_among_the_examples_is_named(example, at):
    batch = [example] * 3
    batch[at] = None
    with pytest.raises(ValueError, match="got None among them"):
        D.concat_examples(batch)
