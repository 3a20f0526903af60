"""Iterators without a seed of their own: each has another order, which follows from the seed of the run."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from loader_examples import Numbers

from dbrdist import random
from dbrdist.core.random import permutation
from dbrdist.datasets.order import ShuffleOrderSampler
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator

N = 40


def order(iterator):
    with iterator:
        return [int(i) for batch in itertools.islice(iterator, N // 4) for i in batch]


def make(count=4, **options):
    return [order(SerialIterator(np.arange(N), 4, **options)) for _ in range(count)]


def all_differ(orders):
    return all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("share", [{}, {"rank": 0, "size": 1}])
def test_iterators_differ_and_runs_repeat(share):
    first = make(**share)
    assert all_differ(first) and all(sorted(o) == list(range(N)) for o in first)
    random.set_seed(0)
    assert make(**share) == first
    random.set_seed(1)
    other = make(**share)
    assert all_differ(first + other)


def test_the_first_iterator_has_the_seed_of_the_run():
    random.set_seed(7)
    assert make(1) == [permutation(7, 0, N).tolist()]
    assert SerialIterator(np.arange(N), 4).seed != 7


def test_a_seed_that_is_given_holds_and_does_not_count():
    expected = make(3)
    random.set_seed(0)
    got = []
    for _ in range(3):
        assert make(2, seed=5) == [permutation(5, 0, N).tolist()] * 2
        assert make(1, seed=0) == [permutation(0, 0, N).tolist()]
        got += make(1)
    assert got == expected


def test_all_kinds_of_iterators_and_samplers_count():
    data = Numbers(N)
    kinds = [
        lambda: SerialIterator(data, 4),
        lambda: MultithreadIterator(data, 4),
        lambda: MultiprocessIterator(data, 4, n_processes=1),
        lambda: SerialIterator(data, 4, shuffle=False),
    ]
    iterators = [make() for make in kinds * 2]
    seeds = [it.seed for it in iterators] + [ShuffleOrderSampler().seed, ShuffleOrderSampler(None).seed]
    for it in iterators:
        it.finalize()
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ranks_make_the_same_orders_whatever_else_one_of_them_makes():
    """Rank 0 often makes a test set of its own; the blocks of the ranks must still be those of one order."""

    def rank(r, size, own, out):
        for _ in range(own):
            SerialIterator(np.arange(N), 4)
        blocks = [SerialIterator(np.arange(N), 8, rank=r, size=size) for _ in range(2)]
        out[r] = [[[int(i) for i in batch] for batch in itertools.islice(it, N // 8)] for it in blocks]

    whole = {}
    rank(0, 1, 0, whole)
    for size in (2, 3):
        parts = {}
        threads = [threading.Thread(target=rank, args=(r, size, 3 * (r == 0), parts)) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for k in range(2):
            joined = [[x for r in range(size) for x in parts[r][k][i]] for i in range(N // 8)]
            assert joined == whole[0][k]
    assert whole[0][0] != whole[0][1]


def test_a_divided_iterator_differs_from_one_that_is_not():
    assert all_differ(make(2) + make(2, rank=0, size=1))


def test_a_position_of_the_stream_has_the_counts():
    make(2)
    make(1, rank=0, size=1)
    state = random.get_state()
    expected = make(2) + make(2, rank=0, size=1)
    random.set_state(state)
    assert make(2) + make(2, rank=0, size=1) == expected
    with pytest.raises(ValueError, match="argument"):
        random.set_state(state[:6])


def test_numpys_global_seed_has_no_effect():
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    orders = make(2)
    random.set_seed(0)
    np.random.seed(4)
    assert make(2) == orders
    np.random.seed(3)
    assert np.random.get_state()[1].tolist() == before


def test_a_resumed_iterator_has_the_saved_order():
    saved = {}

    def save(key, value):
        saved[key] = value
        return value

    save.is_loading = False
    make(3)
    it = SerialIterator(np.arange(N), 4)
    next(it)
    it.serialize(save)
    expected = [list(map(int, next(it))) for _ in range(15)]
    random.set_seed(9)
    again = SerialIterator(np.arange(N), 4)
    again.serialize(lambda key, value: saved[key])
    assert [list(map(int, next(again))) for _ in range(15)] == expected
