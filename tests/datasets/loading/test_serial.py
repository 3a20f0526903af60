"""Tests of dbrdist.datasets.loading.serial."""

from __future__ import annotations

import functools
import itertools
import operator
import threading

import numpy as np
import pytest

from dbrdist import iterators, random
from dbrdist.core.array.random import permutation
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.datasets import AugmentedDataset, TupleDataset
from dbrdist.datasets.loading import serial
from dbrdist.datasets.loading.order import ShuffleOrderSampler
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CheckpointError
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, OrderSampler
from tests.datasets.loader_examples import Noisy, Numbers, add_noise, run
from tests.each import each


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


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 7])
def test_an_iterator_comes_back_with_where_it_was_before(num_steps):
    def make(**options):
        return SerialIterator(list(range(10)), 3, seed=4, **options)

    iterator = make()
    for _ in range(num_steps):
        iterator.next()
    state = DictionarySerializer()
    iterator.serialize(state)
    again = make()
    again.serialize(NpzDeserializer(state.target))
    for name in ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch", "current_position"):
        assert getattr(again, name) == getattr(iterator, name), name
    if num_steps:
        assert again.previous_epoch_detail == pytest.approx(3 * (num_steps - 1) / 10)
    assert again.next() == iterator.next()


def threads(*args, **kwargs):
    return MultithreadIterator(*args, n_threads=2, **kwargs)


def processes(*args, **kwargs):
    return MultiprocessIterator(*args, n_processes=2, **kwargs)


def save(it):
    s = DictionarySerializer()
    it.serialize(s)
    return s.target


def load(it, saved):
    it.serialize(NpzDeserializer(saved))


class Reversing(OrderSampler):
    """A sampler that needs the order before: reverses and rotates it."""

    def __call__(self, current_order, current_position):
        return np.roll(current_order[::-1], 1)


@pytest.mark.parametrize("options", [{}, {"last": "short"}, {"last": "drop"}, {"shuffle": False}, "sampler"])
@pytest.mark.parametrize("make", [SerialIterator, threads])
def test_resume_at_every_position_equals_the_straight_run(make, options):
    if options == "sampler":
        options = {"order_sampler": Reversing()}
    with make(Noisy(10), 4, seed=5, **options) as straight:
        whole = run(straight, 9)
    for k in range(9):
        with make(Noisy(10), 4, seed=5, **options) as it:
            run(it, k)
            saved = save(it)
        with make(Noisy(10), 4, **options) as resumed:  # the saved seed counts
            run(resumed, 2)
            load(resumed, saved)
            assert run(resumed, 9 - k) == whole[k:]


@pytest.mark.slow
def test_resume_of_processes_equals_the_straight_run():
    straight = run(SerialIterator(Noisy(10), 4, seed=5), 9)
    with processes(Noisy(10), 4, seed=5) as it:
        assert run(it, 5) == straight[:5]
        saved = save(it)
        assert run(it, 2) == straight[5:7]
        load(it, saved)  # drops what was made ahead
        assert run(it, 4) == straight[5:]
        it.reset()
        assert run(it, 2) == straight[:2]


def test_saved_state_is_integers_that_do_not_know_the_ranks():
    states = []
    for size in (1, 2, 3):
        it = SerialIterator(Noisy(10), 4, seed=5, rank=size - 1, size=size)
        run(it, 4)
        states.append(save(it))
    assert states[0] == states[1] == states[2]
    assert all(v.dtype.kind == "i" and v.ndim == 0 for v in states[0].values())


def test_a_run_saved_on_one_rank_goes_on_over_three():
    it = SerialIterator(Noisy(10), 4, seed=5)
    run(it, 4)
    saved = save(it)
    ranks = [SerialIterator(Noisy(10), 4, rank=r, size=3) for r in range(3)]
    for r in ranks:
        load(r, saved)
    for _ in range(5):
        parts = [run(r, 1)[0] for r in ranks]
        (whole,) = run(it, 1)
        assert functools.reduce(operator.iadd, (p[1] for p in parts), []) == whole[1]
        assert functools.reduce(operator.iadd, (p[0][0] for p in parts), []) == whole[0][0]


def test_resume_with_other_data_is_refused():
    saved = save(SerialIterator(Numbers(10), 4))
    with pytest.raises(CheckpointError, match=r"dataset of 10 examples, as it was when .* saved, got 11"):
        load(SerialIterator(Numbers(11), 4), saved)


def test_augmentation_does_not_depend_on_the_ranks():
    data = AugmentedDataset(TupleDataset(np.zeros((11, 2, 3, 1)), np.arange(11, dtype=np.int32)), add_noise)
    whole = run(SerialIterator(data, 4, seed=2), 6)
    for size in (2, 3, 4):
        ranks = [run(SerialIterator(data, 4, seed=2, rank=r, size=size), 6) for r in range(size)]
        for step, expected in enumerate(whole):
            assert functools.reduce(operator.iadd, (r[step][0][0] for r in ranks), []) == expected[0][0]


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


KINDS = {
    "serial": SerialIterator,
    "threads": iterators.MultithreadIterator,
    "processes": lambda *args, **options: iterators.MultiprocessIterator(*args, n_processes=1, **options),
}


@pytest.mark.parametrize(
    "kind, options",
    [*((kind, {"shuffle": False}) for kind in KINDS), ("serial", {"last": "drop"}), ("serial", {"rank": 1, "size": 2})],
    ids=str,
)
def test_an_empty_dataset_that_is_not_repeated_is_no_batches(kind, options):
    """A rank's part of a small dataset may be one."""
    iterator = KINDS[kind]([], 4, repeat=False, **options)
    for _ in range(2):
        assert list(iterator) == []
        assert (iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail) == (0, False, 0.0)
        iterator.reset()
    saved = DictionarySerializer()
    iterator.serialize(saved)
    KINDS[kind]([], 4, repeat=False, **options).serialize(NpzDeserializer(saved.target))
    with pytest.raises(ValueError, match="an empty one, which cannot be repeated"):
        KINDS[kind]([], 4)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mapping_from_numbers_is_a_dataset(shuffle):
    data = {i: 10 * i for i in range(5)}
    batches = SerialIterator(data, 2, repeat=False, shuffle=shuffle)
    assert sorted(x for batch in batches for x in batch) == [0, 10, 20, 30, 40]
    with pytest.raises(TypeError, match="got dict; write DictDataset"):
        SerialIterator({"x": [1, 2], "t": [3, 4]}, 2)


@each(chainer=[False, True])
def test_the_order_that_old_states_call_by_another_name(chainer, monkeypatch):
    """Where a sampler of one's own made it: the iterator that goes on has none."""
    monkeypatch.setattr(serial, "as_chainer", [chainer])
    first = SerialIterator([1, 2, 3, 4, 5, 6], 2, order_sampler=lambda order, position: np.array([5, 3, 1, 0, 2, 4]))
    seen = [*first.next(), *first.next()]
    state = {}
    first.serialize(DictionarySerializer(state))
    state["_order"] = state.pop("order")
    after = SerialIterator([1, 2, 3, 4, 5, 6], 2)
    after.serialize(NpzDeserializer(state))
    assert [*seen, *after.next()] == [6, 4, 2, 1, 3, 5]
    assert after.is_new_epoch and after.epoch_detail == 1
