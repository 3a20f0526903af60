"""The tree in which virtual workers are added."""

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import tree_sum
from dbrdist.datasets.loading.base import block_bounds
from tests.each import each


def by_recursion(values):
    """The tree, written down as its definition: the left child has the largest power of two below all leaves."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return by_recursion(values[:half]) + by_recursion(values[half:])


def values_of(num_leaves, size=5):
    """Numbers of many magnitudes, whose sum depends on the order of additions."""
    rng = np.random.default_rng(num_leaves)
    return (rng.standard_normal((num_leaves, size)) * 10.0 ** rng.integers(-6, 6, (num_leaves, size))).astype("f")


@pytest.mark.parametrize("num_leaves", [*range(1, 18), 31, 32, 33, 100])
def test_any_division_gives_the_same_bits(num_leaves):
    values = values_of(num_leaves)
    expected = by_recursion(list(values))
    for size in {1, 2, 3, 4, 5, 7, 8, num_leaves} & set(range(1, num_leaves + 1)):
        nodes, sums = [], []
        for rank in range(size):
            mine = tree_sum.TreeSum()
            for leaf in range(*block_bounds(num_leaves, rank, size)):
                mine.add(leaf, [values[leaf]], 1.0)
            assert mine.nodes == tree_sum.subtrees(*block_bounds(num_leaves, rank, size))
            nodes += mine.nodes
            sums += [total for (total,) in mine.sums]
        assert tree_sum.fold(nodes, sums, np.add).tobytes() == expected.tobytes()


def test_the_order_matters_in_these_tests():
    values = values_of(33)
    assert by_recursion(list(values)).tobytes() != sum(values[1:], values[0]).tobytes()


@pytest.mark.parametrize("num_leaves", [1, 2, 8, 64, 1000])
def test_a_rank_holds_few_sums(num_leaves):
    total, most = tree_sum.TreeSum(), 0
    a = np.ones(3, "f")
    for leaf in range(num_leaves):
        total.add(leaf, [a], 1.0)
        most = max(most, len(total.sums) + len(total._spare))
    assert most <= num_leaves.bit_length() + 1
    np.testing.assert_array_equal(total.total()[0], num_leaves)
    np.testing.assert_array_equal(a, 1)  # what was given is as it was


def test_buffers_are_used_again():
    total = tree_sum.TreeSum()
    for _ in range(2):
        total.clear()
        for leaf in range(3, 7):
            total.add(leaf, [np.full(4, leaf, "f")], 2.0)
        made = {id(a) for sums in total.sums for a in sums}
    total.clear()
    total.add(0, [np.zeros(4, "f")], 1.0)
    assert {id(a) for sums in total.sums for a in sums} < made
    total.clear()
    total.add(0, [np.zeros(5, "f")], 1.0)  # of another size: a new one
    assert total.sums[0][0].shape == (5,)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_added_in_32(dtype):
    total = tree_sum.TreeSum()
    for leaf in range(4):
        total.add(leaf, [np.full(2, 1 + leaf / 64, dtype)], 1000.0)
    (found,) = total.total()
    assert found.dtype == np.float32
    expected = sum(1000 * float(dtype(1 + leaf / 64)) for leaf in range(4))
    np.testing.assert_array_equal(found, np.float32(expected))


def test_weights_and_not_a_number():
    total = tree_sum.TreeSum()
    total.add(0, [np.array([1, np.inf, np.nan, -0.0], "f"), np.array([1.0])], 3.0)
    total.add(1, [np.array([2, 1, 1, -0.0], "f"), np.array([4.0])], 0.0)
    a, b = total.total()
    np.testing.assert_array_equal(a, [3, np.inf, np.nan, 0])
    np.testing.assert_array_equal(b, [3])


@pytest.mark.parametrize("size", [0, 1, 3, 1000, 40000])
@pytest.mark.parametrize(("num_leaves", "num_ranks"), [(8, 2), (8, 3), (7, 4), (5, 5)])
def test_over_ranks(size, num_leaves, num_ranks, monkeypatch):
    """Short arrays are added everywhere, long ones by owners, very long ones in several exchanges."""
    monkeypatch.setattr(tree_sum, "_EXCHANGE_ELEMENTS", 17000)
    values = values_of(num_leaves, size)

    def work(comm):
        mine = tree_sum.TreeSum()
        for leaf in range(*block_bounds(num_leaves, comm.rank, comm.size)):
            mine.add(leaf, [values[leaf], values[leaf].astype(np.float64)], 1.0)
        with comm.gate.call("add") as call:
            call.agree()
            return [a.tobytes() for a in tree_sum.add_over_ranks(comm, call, num_leaves, mine)]

    found = run_threads(num_ranks, work, timeout_seconds=60)
    wide = by_recursion(list(values.astype(np.float64)))
    for mine in found:
        assert mine == [by_recursion(list(values)).tobytes(), wide.tobytes()]


def test_siblings():
    node = tree_sum.Node
    pairs = itertools.product([node(start, level) for start in range(8) for level in range(3)], repeat=2)
    siblings = [(a, b) for a, b in pairs if a.is_left_of(b)]
    assert siblings == [
        (node(0, 0), node(1, 0)),
        (node(0, 1), node(2, 1)),
        (node(0, 2), node(4, 2)),
        (node(2, 0), node(3, 0)),
        (node(4, 0), node(5, 0)),
        (node(4, 1), node(6, 1)),
        (node(6, 0), node(7, 0)),
    ]


@each(**{"elements, everywhere": [(4096, True), (4097, False), (1, True)]})
def test_short_sums_of_leaves_are_added_by_all(monkeypatch, elements, everywhere):
    """Four subtrees of 16 KiB each are 64 KiB."""
    done = []
    for name in ("_add_everywhere", "_add_by_owners"):
        monkeypatch.setattr(
            tree_sum, name, lambda comm, nodes, mine, name=name: done.append((name, [a.size for a in mine]))
        )
    nodes = [[tree_sum.Node(0, 0), tree_sum.Node(1, 0)], [tree_sum.Node(2, 0), tree_sum.Node(3, 0)]]
    mine = [np.zeros(elements, "f4") for _ in range(2)]
    call = SimpleNamespace(num_bytes=0, kind=None)
    assert tree_sum._added("comm", call, nodes, mine) is mine[0]
    assert done == [("_add_everywhere" if everywhere else "_add_by_owners", [elements] * 2)]
    assert call.num_bytes == 4 * elements and call.kind == np.float32


@each(size=[10, 40_000])
def test_sums_in_a_tree_note_what_each_rank_gets(size):
    def body(comm):
        mine = tree_sum.TreeSum()
        for leaf in range(*block_bounds(4, comm.rank, comm.size)):
            mine.add(leaf, [np.ones(size, "f4"), np.ones(3, "f8")], 1.0)
        with comm.gate.call("add") as call:
            call.agree()
            tree_sum.add_over_ranks(comm, call, 4, mine)
        return call.num_bytes, call.kind

    assert run_threads(2, body, timeout_seconds=60) == [(4 * size + 24, np.float64)] * 2


@each(case=[("f2", "f4", True), ("f4", "f4", True), ("f8", "f8", True), ("f4", "f8", False), ("f2", "f2", False)])
def test_buffers_of_a_shape_in_the_type_of_the_sum_are_used_again(case):
    given, held, is_used = case
    like = [np.ones(3, given), np.ones(5, given)]
    one, spare = tree_sum.TreeSum(), [np.zeros(3, held), np.zeros(5, held)]
    one._spare = [[np.zeros(3, held)], spare, [np.zeros(5, held), np.zeros(3, held)]]
    found = one._buffers(like)
    assert (found is spare) is is_used and len(one._spare) == is_used  # what does not fit is given up
    assert [(a.shape, a.dtype) for a in found] == [((3,), found[0].dtype), ((5,), found[0].dtype)]
    assert found[0].dtype == ("f8" if given == "f8" else "f4")


def test_buffers_are_kept_from_one_sum_to_the_next():
    one, leaf = tree_sum.TreeSum(), [np.ones(3, np.float16)]
    one.add(0, leaf, 2.0)
    (first,) = one.sums[0]
    assert first.dtype == np.float32 and first.tolist() == [2, 2, 2]
    one.clear()
    assert one.nodes == one.sums == []
    one.add(0, leaf, 5.0)
    assert one.sums[0][0] is first and first.tolist() == [5, 5, 5]
