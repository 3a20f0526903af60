"""Tables: views of views give what lists of rows give, read only what is asked for, and refuse what does not fit."""

from __future__ import annotations

import doctest
import pickle

import numpy as np
import pytest

from dbrdist.dataset import TabularDataset, concat_examples
from dbrdist.datasets import SkipExample
from dbrdist.datasets.table import columns
from dbrdist.datasets.table.tabular import from_data
from dbrdist.iterators import MultithreadIterator, SerialIterator
from tests.datasets.table.table_examples import Table, X, Y, Z
from tests.each import each
from tests.warm import ROOT

ROWS = [(X[i], Y[i], Z[i]) for i in range(10)]


def same(found, expected):
    found, expected = [list(map(str, row)) for row in found], [list(map(str, row)) for row in expected]
    assert found == expected


def table():
    return from_data((("x", X), ("y", Y), ("z", lambda i: i * i)), size=10)


@each(make=[Table, table])
def test_examples_and_columns(make):
    data = make()
    assert isinstance(data, TabularDataset) and len(data) == 10 and data.keys == ("x", "y", "z") and data.mode is tuple
    same([data[3], data[-1], data[np.int64(0)]], [ROWS[3], ROWS[9], ROWS[0]])
    same(data[2:5], ROWS[2:5])
    same(data[[7, 1]], [ROWS[7], ROWS[1]])
    same(list(data), ROWS)
    same(zip(*data.fetch()), ROWS)
    assert data.asdict()[4].keys() == {"x", "y", "z"} and data.asdict()[4]["z"] == 16
    assert list(data.asdict().fetch()) == ["x", "y", "z"]
    same(zip(*data.asdict().astuple().fetch()), ROWS)
    for wrong in (10, -11):
        with pytest.raises(IndexError, match="below 10, the number of examples, got"):
            data[wrong]


SLICES = [
    slice(None), slice(2, 7), slice(None, None, -1), slice(8, 1, -3), slice(-4, None), slice(5, 5), slice(0, 100, 4),
    [3, 1, 1, -2], [], np.array([4, 0]), (np.arange(10) % 3 == 0), [i > 6 for i in range(10)],
]  # fmt: skip


def reference(rows, index):
    if isinstance(index, slice):
        return rows[index]
    if len(index) and isinstance(index[0], (bool, np.bool_)):
        return [row for row, wanted in zip(rows, index) if wanted]
    return [rows[i] for i in index]


@each(make=[Table, table], first=SLICES, second=[slice(None), slice(None, None, -2), [0, -1], []])
def test_slices_of_slices(make, first, second):
    data, expected = make().slice[first], reference(ROWS, first)
    same(data, expected)
    same(zip(*data.fetch()), expected)
    if not expected and second == [0, -1]:
        with pytest.raises(IndexError):
            data.slice[second]
        return
    same(zip(*data.slice[second].fetch()), reference(expected, second))
    same(zip(*data.slice[second, ("z", 0)].fetch()), [(z, x) for x, _, z in reference(expected, second)])


def test_slices_of_columns():
    data = Table()
    bare = data.slice[1:4, "z"]
    assert bare.mode is None and bare.keys == ("z",) and bare[0] == 1 and bare.fetch().tolist() == [1, 4, 9]
    assert data.slice[:, (-3, 2)].keys == ("x", "z")
    assert data.slice[1:4, 1].fetch() == ["b", "c", "d"] and data.slice[:, -1].keys == ("z",)
    assert data.slice[:, ("z",)].mode is tuple and data.slice[[2], ("z",)][0] == (4,)
    assert bare.slice[:, ("z",)].mode is tuple and Table(dict).slice[[2], ("z",)][0] == {"z": 4}
    same(data.slice[[5, 2], ("z", "x", "z")].slice[[1], (2, 1)].fetch(), [[4], [X[2]]])


def test_only_what_is_wanted_is_read():
    data = Table()
    data.slice[2:8, ("z", "x")].slice[::3, "x"].fetch()
    assert data.asked == [(slice(2, 8, 3), (0,))]
    data.asked.clear()
    data.slice[::-1][0]
    assert data.asked == [([9], None)]
    data.asked.clear()
    joined = data.join(from_data({"w": Z}))
    joined.slice[[1], "w"].fetch()
    assert data.asked == []
    joined.slice[[1], ("w", "z")].fetch()
    assert data.asked == [([1], (2,))]


@each(index=[slice(None), slice(3, 17, 4), slice(19, None, -3), [19, 0, 10, 9, 10], slice(2, 5), slice(12, 15), []])
def test_concat(index):
    data = Table().concat(table(), Table().slice[[0, 9]])
    rows = [*ROWS, *ROWS, ROWS[0], ROWS[9]]
    assert len(data) == 22 and data.keys == ("x", "y", "z")
    same(data, rows)
    same(zip(*data.slice[index].fetch()), reference(rows, index))
    same(zip(*data.slice[index, ("y", "x")].fetch()), [(y, x) for x, y, _ in reference(rows, index)])
    assert data.fetch()[0].dtype == X.dtype  # columns of arrays stay arrays


def test_join():
    more = from_data({"u": Z * 2, "v": Y})
    data = Table().join(more, from_data(("w", list(range(10)))))
    assert data.keys == ("x", "y", "z", "u", "v", "w") and data.mode is tuple
    same(data, [(*row, 2 * z, y, i) for i, (row, z, y) in enumerate(zip(ROWS, Z, Y))])
    same(data.slice[3:5, ("w", "x", "u", "w")].fetch(), [[3, 4], X[3:5], 2 * Z[3:5], [3, 4]])
    same(data.slice[[6], ("v", "u")].fetch(), [["g"], [72]])
    assert from_data(Z).join(more).mode is dict and from_data(Z).join(from_data(Y)).mode is tuple


@each(mode=[tuple, dict], kind=["tuple", "dict", "value"], index=[slice(None), [4, 2], slice(8, 3, -2)])
def test_transform(mode, kind, index):
    def transform(x, y, z):
        return {"tuple": (x.sum(), y * 2), "dict": {"b": y * 2, "a": x.sum()}, "value": z + 1}[kind]

    keys = "a" if kind == "value" else ("a", "b")
    data = Table(mode).transform(keys, transform)
    assert data.mode is {"tuple": tuple, "dict": dict, "value": None}[kind] and len(data) == 10
    columns = ("a",) if kind == "value" else ("a", "b")
    expected = [(z + 1,) if kind == "value" else (x.sum(), y * 2) for x, y, z in ROWS]
    same(zip(*data.slice[index, columns].astuple().fetch()), reference(expected, index))
    if kind != "value":
        assert data.slice[index, "b"].fetch() == [b for _, b in reference(expected, index)]


@each(mode=[tuple, dict], kind=["tuple", "dict", "value"], index=[slice(None), [4, 2], slice(8, 3, -2)])
def test_transform_batch(mode, kind, index):
    calls = []

    def transform(x, y, z):
        calls.append(len(y))
        return {"tuple": (x.sum(1), [c * 2 for c in y]), "dict": {"a": x.sum(1), "b": [c * 2 for c in y]}}.get(kind, z)

    data = Table(mode).transform_batch("a" if kind == "value" else ("a", "b"), transform).slice[index]
    found = data.fetch()
    expected = reference([(z,) if kind == "value" else (x.sum(), y * 2) for x, y, z in ROWS], index)
    columns = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    same(zip(*columns), expected)
    assert data.mode is {"tuple": tuple, "dict": dict, "value": None}[kind] and set(calls) <= {len(expected), 1}


def test_converters():
    data = from_data({"x": [np.arange(3), np.arange(3) + 1], "y": [1, 2]})
    arrays = data.convert(data.fetch())
    assert arrays["x"].tolist() == [[0, 1, 2], [1, 2, 3]] and arrays["y"].tolist() == [1, 2]
    assert data.slice[:, "y"].convert([1.5, 2]).dtype == np.float64 and data.convert([]).shape == (0,)
    other = data.with_converter(lambda columns: sorted(columns))
    for view in (other, other.slice[:1], other.asdict(), other.concat(data), other.join(from_data(("z", [0, 0])))):
        assert view.convert(data.fetch()) == ["x", "y"]
    other = other.transform("w", lambda x, y: y)
    assert other.convert("ba") == ["a", "b"] and other.fetch() == [1, 2]


def test_from_data():
    assert from_data(Z)[3] == 9 and from_data(Y)[3] == "d" and from_data(Y).mode is None
    assert from_data(("a", lambda i: i * i), size=10)[5] == 25
    assert from_data((Z, Y))[2] == (4, "c") and len(set(from_data((Z, Z)).keys)) == 2
    both = from_data((("a", "b"), lambda i: (i, -i)), size=3)
    assert both.keys == ("a", "b") and both.mode is tuple and both[2] == (2, -2)
    assert from_data({("a", "b"): lambda i: {"b": i, "a": 0}, "c": range(4)})[3] == {"a": 0, "b": 3, "c": 3}
    assert from_data((Z, ("k", Y), (("m", "n"), lambda i: (i, 1)))).slice[[2], ("k", "n")][0] == ("c", 1)
    assert from_data(from_data(Z).slice[::2])[1] == 4  # another dataset is a column too
    assert from_data(((1, 2), [3, 4]))[1] == (2, 4)  # of two rows, and no names
    assert from_data((["a", "b"], [1, 2]))[0] == ("a", 1)
    assert from_data({"x": range(3), "t": lambda i: -i})[2] == {"x": 2, "t": -2}
    assert from_data((("x", lambda i: i), ("t", lambda i: -i)), size=4)[3] == (3, -3)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda d: d.slice[3], TypeError, r"rows as a slice or as a list .* got 3; dataset\[i\] gives a single"),
        (lambda d: d.slice[[10]], IndexError, "rows below 10, the number of examples, got 10"),
        (lambda d: d.slice[[0.5]], ValueError, "rows as integers or booleans, got float64"),
        (lambda d: d.slice[[True, False]], ValueError, "10 booleans, one for each row, got 2"),
        (lambda d: d.slice[:, "q"], KeyError, "keys among .*'x', 'y', 'z'.*, got 'q'"),
        (lambda d: d.slice[:, (3,)], IndexError, "a column below 3"),
        (lambda d: d.concat(from_data(Z)), ValueError, r"keys \('x', 'y', 'z'\) to concat, got .* in number 1"),
        (lambda d: d.join(from_data([1])), ValueError, r"one length to join, got \[10, 1\]"),
        (lambda d: d.join(Z), TypeError, "expected a TabularDataset, got ndarray; see tabular.from_data"),
        (lambda d: d.slice[[True, 2]], ValueError, r"integers or as booleans, got both in \[True, 2\]"),
        (lambda d: d.slice[:, ["x"]], TypeError, r"a column's name or position, or a tuple of them, got \['x'\]"),
        (lambda d: d.transform(["a", "b"], len), ValueError, r"tuple of different names .* got \['a', 'b'\]"),
        (lambda d: d.transform(("a", "a"), len), ValueError, "tuple of different names"),
        (lambda d: d.concat(ROWS), TypeError, "expected a TabularDataset, got list"),
        (lambda d: d.join(d), ValueError, r"different keys to join, but \['x', 'y', 'z'\] come more than once"),
        (lambda d: d.transform("a", 3), TypeError, "a function for the transform, got 3"),
        (lambda d: d.transform("a", lambda *_: (1, 2))[0], ValueError, r"return 1 values for \('a',\), got 2"),
        (lambda d: d.transform(("a", "b"), lambda *_: {"a": 1})[0], ValueError, r"keys \('a', 'b'\), got \('a',\)"),
        (
            lambda d: list(d.transform("a", lambda x, y, z: z if z < 5 else (z,))),
            ValueError,
            "return a single value as",
        ),
        (lambda d: d.slice[:0].transform("a", len).mode, ValueError, "say it with astuple"),
        (lambda d: d.transform_batch("a", lambda *_: [1]).fetch(), ValueError, "return 10 values for 'a', got 1"),
        (lambda d: from_data(len), ValueError, "a name for the column that"),
        (lambda d: from_data(("a", len)), ValueError, "the number of rows, size=, for the column 'a'"),
        (lambda d: from_data(()), ValueError, "at least one column"),
        (lambda d: d.slice[:, (-4,)], IndexError, "a column below 3"),
        (lambda d: d.slice[[-11]], IndexError, "rows below 10, the number of examples, got -11"),
        (lambda d: from_data({"a": {1, 2}}), TypeError, "an array, a list, a dataset or a function, got set"),
        (lambda d: from_data(((1, 2), [3, 4, 5])), ValueError, "columns of 2 rows, got 3$"),
        (lambda d: from_data({"a": 3}), TypeError, "an array, a list, a dataset or a function, got int"),
        (lambda d: from_data({"a": [1], "b": [1, 2]}), ValueError, "columns of 1 rows, got 2 in 'b'"),
        (lambda d: from_data((("a", "b"), [1])), ValueError, r"a function for the columns \('a', 'b'\), got list"),
        (lambda d: TabularDataset()[0], NotImplementedError, "TabularDataset must define __len__"),
        (lambda d: TabularDataset().fetch(), NotImplementedError, r"must define get_examples\(indices, key_indices\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(call, kind, words):
    with pytest.raises(kind, match=words):
        call(Table())


@each(mode=[tuple, dict, None], threads=[False, True])
def test_iterators_read_batches_by_columns(mode, threads):
    data = Table() if mode is tuple else Table(dict) if mode is dict else Table().slice[:, "z"]
    expected = [concat_examples([data[i] for i in range(k, min(k + 4, 10))]) for k in (0, 4, 8)]
    make = MultithreadIterator if threads else SerialIterator
    with make(data, 4, repeat=False, shuffle=False) as iterator:
        found = [concat_examples(batch) for batch in iterator]
    assert str(found) == str(expected)
    if mode is not None and not threads:
        assert ([0, 1, 2, 3], None) in data.asked


def _double(x, y, z):
    return x * 2, y


def test_views_travel_to_other_processes():
    view = (
        table_of_arrays()
        .join(from_data({"k": Y}))
        .slice[::2]
        .transform(("a", "b"), _three)
        .concat(table_of_arrays().transform(("a", "b"), _double))
    )
    same(pickle.loads(pickle.dumps(view)), view)
    assert len(view) == 15


@each(order=["C", "F"])
def test_mapped_files_are_mapped_again_in_other_processes(order, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"{order}.npy"
    whole = np.arange(60_000.0).reshape(20_000, 3)
    np.save(path, np.asarray(whole, order=order))
    for mapped, is_small in ((np.load(path, mmap_mode="r"), True), (np.load(path, mmap_mode="r")[2:], False)):
        packed = pickle.dumps(from_data({"x": mapped}).slice[5:9])
        assert (len(packed) < 2000) == is_small
        found = pickle.loads(packed).fetch()["x"]
        assert np.array_equal(found, mapped[5:9]) and isinstance(found, np.memmap) == is_small
    changed = np.load(path, mmap_mode="c")
    changed[0] = -1
    assert pickle.loads(pickle.dumps(from_data(changed)))[0].tolist() == [-1, -1, -1]


def table_of_arrays():
    return from_data((("x", X), ("y", Y), ("z", Z)))


def _three(x, y, z, k):
    return x * 3, k


def test_an_example_that_is_skipped_leaves_the_others():
    def read(z):
        if z == 9:
            raise SkipExample("number 3 is unreadable")
        return z

    data = Table().slice[:, "z"].transform("z", read)
    iterator = SerialIterator(data, 5, repeat=False, shuffle=False)
    assert list(iterator.next()) == [0, 1, 4, 16] and iterator.skipped == ["number 3 is unreadable"]


def test_the_examples_in_the_docs(capsys):
    assert doctest.testmod(columns) == (0, 3)
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    code, _, after = page.partition("## Tables")[2].partition("```python\n")[2].partition("```\n```\n")
    exec(code, {})
    assert capsys.readouterr().out == after.partition("```")[0]


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
