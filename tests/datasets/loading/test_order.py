"""Which examples the batches hold: once per epoch, the same for any number of ranks, Chainer's at the epoch's end."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

import dbrdist
from dbrdist import iterators
from dbrdist.core.array.random import generator
from dbrdist.datasets import block, block_bounds
from dbrdist.datasets.loading import order
from dbrdist.datasets.loading import order as orders_of_epochs
from dbrdist.datasets.loading.order import Plan
from dbrdist.errors import UsageWarning
from dbrdist.iterators import OrderSampler, SerialIterator, ShuffleOrderSampler
from tests.datasets.loader_examples import Noisy
from tests.each import each


def take(it, n):
    return [next(it) and it.indices.tolist() for _ in range(n)]


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (12, 4), (13, 5), (7, 7), (4, 4), (23, 6)])
@each(size=[1, 2, 3, 4], last=["wrap", "short", "drop"])
def test_ranks_together_see_the_batches_of_one_rank(n, batch_size, size, last):
    alone = SerialIterator(np.arange(n), batch_size, seed=3, last=last)
    ranks = [SerialIterator(np.arange(n), batch_size, seed=3, last=last, rank=r, size=size) for r in range(size)]
    for _ in range(3 * n // batch_size + 3):
        next(alone)
        row = 0
        for it in ranks:
            batch = next(it)
            assert it.row == row
            assert it.num_samples_global == len(alone.indices)
            assert len(batch) == len(it.indices)
            assert (it.epoch, it.current_position, it.is_new_epoch) == (
                alone.epoch,
                alone.current_position,
                alone.is_new_epoch,
            )
            row += len(it.indices)
        assert np.concatenate([it.indices for it in ranks]).tolist() == alone.indices.tolist()
        lengths = [len(it.indices) for it in ranks]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("n", "batch_size"), [(1, 4), (5, 4), (8, 4), (13, 5), (100, 7)])
@each(size=[1, 2, 3, 4])
def test_one_epoch_without_repeat_is_each_example_once(n, batch_size, size):
    seen = []
    for rank in range(size):
        it = SerialIterator(np.arange(n), batch_size, repeat=False, seed=1, rank=rank, size=size)
        seen += [int(x) for batch in it for x in batch]
        assert it.epoch == 1
        with pytest.raises(StopIteration):
            next(it)
    assert sorted(seen) == list(range(n))


def test_short_last_batch_makes_an_epoch_each_example_once():
    it = SerialIterator(np.arange(10), 4, last="short")
    for epoch in range(3):
        batches = take(it, 3)
        assert [len(b) for b in batches] == [4, 4, 2]
        assert sorted(functools.reduce(operator.iadd, batches, [])) == list(range(10))
        assert it.is_new_epoch and it.epoch == epoch + 1 and it.current_position == 0


def test_wrap_fills_batches_as_chainer_does():
    it = SerialIterator(np.arange(5), 2, shuffle=False)
    assert take(it, 2) == [[0, 1], [2, 3]]
    assert (it.epoch, it.is_new_epoch, it.epoch_detail, it.previous_epoch_detail) == (0, False, 0.8, 0.4)
    assert take(it, 1) == [[4, 0]]
    assert (it.epoch, it.is_new_epoch, it.current_position, it.epoch_detail) == (1, True, 1, 1.2)
    assert take(it, 2) == [[1, 2], [3, 4]]
    assert (it.epoch, it.is_new_epoch, it.current_position) == (2, True, 0)


def test_wrap_with_a_batch_larger_than_the_dataset_passes_several_epochs():
    with pytest.warns(UsageWarning, match=r"batch_size: 7 is more than the dataset has \(3\)"):
        it = SerialIterator(np.arange(3), 7, shuffle=False)
    assert take(it, 1) == [[0, 1, 2, 0, 1, 2, 0]]
    assert (it.epoch, it.current_position) == (2, 1)


def test_wrapped_examples_look_as_in_their_own_epoch():
    it = SerialIterator(Noisy(5), 4, seed=9)
    batches = [[x.tolist() for x, _ in next(it)] for _ in range(3)]
    assert [x[1] for x in batches[0]] == [0, 0, 0, 0]
    assert [x[1] for x in batches[1]] == [0, 1, 1, 1]
    assert {x[0] for batch in batches for x in batch} == {9}


def test_drop_leaves_out_other_examples_in_each_epoch():
    it = SerialIterator(np.arange(10), 4, last="drop")
    left_out = []
    for epoch in range(8):
        batches = take(it, 2)
        assert [len(b) for b in batches] == [4, 4]
        assert it.is_new_epoch and it.epoch == epoch + 1
        left_out.append(tuple(set(range(10)) - set(functools.reduce(operator.iadd, batches, []))))
        assert len(left_out[-1]) == 2
    assert len(set(left_out)) > 4


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [ShuffleOrderSampler(seed).order(epoch, 50).tolist() for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert len({tuple(o) for o in orders}) == 6
    assert ShuffleOrderSampler(1).order(2, 50).tolist() == orders[-1]


def test_a_ranks_share_is_another_one_in_each_epoch():
    """One permutation of all examples per epoch is divided; nobody keeps the same part for the whole run."""
    shares = []
    for rank in range(3):
        it = SerialIterator(np.arange(30), 6, seed=0, rank=rank, size=3)
        shares.append([set(functools.reduce(operator.iadd, take(it, 5), [])) for _ in range(4)])
    for epoch in range(4):
        assert sorted(i for share in shares for i in share[epoch]) == list(range(30))
    assert all(len({frozenset(part) for part in share}) == 4 for share in shares)


def test_the_order_is_that_of_earlier_versions():
    # A change of these numbers breaks the resume of every saved run.
    assert ShuffleOrderSampler(0).order(0, 8).tolist() == [7, 6, 3, 4, 0, 5, 1, 2]
    assert ShuffleOrderSampler(1).order(3, 8).tolist() == [3, 5, 7, 2, 6, 4, 0, 1]


def test_shuffle_sampler_follows_chainers_protocol():
    sampler = ShuffleOrderSampler(np.random.RandomState(4))
    first = sampler(np.arange(20), 0)
    second = sampler(first, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("last, counts", [("wrap", [4, 4, 4, 4]), ("short", [4, 2, 4, 2]), ("drop", [4, 4, 4])])
def test_a_sampler_may_repeat_examples_and_leave_some_out(last, counts):
    iterator = SerialIterator(np.arange(10), 4, order_sampler=lambda order, position: [0, 0, 3, 3, 5, 5], last=last)
    batches = [next(iterator) for _ in counts]
    assert [len(batch) for batch in batches] == counts
    assert iterator.num_per_epoch == (4 if last == "drop" else 6)
    assert iterator.epoch_detail == pytest.approx(sum(counts) / iterator.num_per_epoch)
    assert {int(x) for batch in batches for x in batch} == ({0, 3} if last == "drop" else {0, 3, 5})


@pytest.mark.parametrize(("order", "last"), [([], "wrap"), ([], "short"), ([], "drop"), ([0, 3], "drop")])
def test_a_sampler_without_a_whole_batch_gives_no_batches_and_cannot_be_repeated(order, last):
    options = {"order_sampler": lambda current, position: order, "last": last}
    assert list(SerialIterator(np.arange(10), 4, repeat=False, **options)) == []
    with pytest.raises(ValueError, match=f"gave {len(order)} examples, which make no batch of 4 with last='{last}'"):
        SerialIterator(np.arange(10), 4, **options)


def test_booleans_of_a_sampler_are_no_order():
    with pytest.raises(ValueError, match=r"got booleans; write np.flatnonzero\(mask\)"):
        next(SerialIterator(np.arange(3), 1, order_sampler=lambda order, position: np.arange(3) > 0))


def test_a_samplers_order_of_another_length_than_before_is_refused():
    class Bad(OrderSampler):
        def __call__(self, current_order, current_position):
            return current_order[:-1]

    iterator = SerialIterator(np.arange(4), 2, order_sampler=Bad())
    iterator.next()
    with pytest.raises(ValueError, match=r"expected an order of 3 examples .* as in the first epoch, got 2"):
        iterator.next()


def test_blocks_are_contiguous_complete_and_even():
    for n in range(12):
        for size in range(1, 7):
            parts = [block(list(range(n)), r, size) for r in range(size)]
            assert functools.reduce(operator.iadd, parts, []) == list(range(n))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert [block_bounds(n, r, size)[0] for r in range(size)] == [sum(map(len, parts[:r])) for r in range(size)]


def test_a_rank_without_examples_gets_arrays_of_length_0():
    it = SerialIterator(Noisy(5), 4, repeat=False, rank=0, size=2)
    lengths = [len(batch) for batch in it]
    assert lengths == [2, 0]
    assert it.num_samples_global == 1
    it.reset()
    next(it)
    empty = next(it)
    assert [a.shape for a in empty.arrays] == [(0, 3), (0,)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2, "size": 3}, "at least one example per rank, got batch_size=2 for 3 ranks"),
        ({"batch_size": 20, "size": 11}, "at least one example per rank, got 10 examples for 11 ranks"),
        ({"batch_size": 0}, "batch size of at least 1, got 0"),
        ({"batch_size": 2, "rank": 2, "size": 2}, "0 <= rank < size, got rank=2 and size=2"),
        ({"batch_size": 2, "last": "pad"}, "got 'pad'"),
        ({"batch_size": 20, "last": "drop"}, "got 10 examples for batches of 20"),
        ({"batch_size": 2, "shuffle": True, "order_sampler": ShuffleOrderSampler()}, "got both"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SerialIterator(np.arange(10), **arguments)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="got an empty one"):
        SerialIterator([], 2)


@pytest.mark.parametrize("many", [1000, 1001])
def test_the_order_of_many_examples_is_held_in_half_the_memory_and_handed_out_as_before(monkeypatch, many):
    n = 1000
    monkeypatch.setattr(orders_of_epochs, "_MANY", many)
    it = SerialIterator(np.arange(n), 300, seed=5)
    expected = [np.random.Generator.permutation(generator(5, "order", epoch), n) for epoch in range(2)]
    assert it._state.order.dtype == (np.int32 if many <= n else np.int64)
    assert np.array_equal(it._state.order, expected[0])
    found = []
    for _ in range(6):
        next(it)
        assert it.indices.dtype == np.int64  # a dataset may compute an offset of more than 2^31 from it
        found += it.indices.tolist()
    assert found == np.concatenate(expected).tolist()[:1800]


class Far(OrderSampler):
    """Indices that do not fit into 32 bits."""

    def order(self, epoch, n):
        return np.arange(n) + 2**40


@each(order=[Far().order(0, 5), np.arange(5, dtype=np.uint8), [4, 3, 2, 1, 0], np.arange(5, dtype=np.uint64)])
def test_orders_of_other_types_stay_as_they_are(order):
    sampler = Far()
    sampler.order = lambda epoch, n: order
    state, step = Plan(5, 3, True, "wrap", sampler).advance(Plan(5, 3, True, "wrap", sampler).first())
    assert state.order is order
    assert list(step.indices) == list(order[:3])


@pytest.mark.slow
@each(n=[0, 1, 2, 3, 10, 65537, 1 << 17, 1_281_167])
def test_orders_are_the_permutations_of_numpys_generator(n):
    order = ShuffleOrderSampler(7).order(2, n)
    assert order.dtype == (np.int32 if n >= 1 << 17 else np.int64)
    assert np.array_equal(order, generator(7, "order", 2).permutation(n))


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


@each(**{"n, dtype": [(3, "int64"), ((1 << 31) - 1, "int32"), (1 << 31, "int64"), (1 << 33, "int64")]})
def test_positions_of_many_examples_are_of_the_smaller_type_that_holds_them(n, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "permutation", lambda seed, epoch, n, dtype: np.dtype(dtype).name)
        assert order.ShuffleOrderSampler(7).order(0, n) == dtype


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


def test_the_first_sampler_has_the_seed_of_the_run():
    state = dbrdist.random.get_state()
    dbrdist.random.set_seed(7)
    assert order.ShuffleOrderSampler().seed == 7 != order.ShuffleOrderSampler().seed
    dbrdist.random.set_state(state)
