"""Tests of dbrdist.comm.data.iterators."""

from __future__ import annotations

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.data import iterators
from dbrdist.comm.data import iterators as iterators_of_ranks
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.datasets.loading.order import ShuffleOrderSampler
from dbrdist.iterators import SerialIterator
from tests.each import each


@each(is_master=[True, False])
def test_the_state_of_a_shared_iterator_is_its_masters(is_master):
    comm = create_communicator("single")

    def shared():
        made = iterators.create_multi_node_iterator(SerialIterator(list(range(7)), 3, seed=5), comm)
        made._is_master = is_master
        return made

    one, other = shared(), shared()
    for _ in range(3):
        next(one)
    writer = DictionarySerializer()
    writer.save(one)
    assert any(key.startswith("master/") for key in writer.target) == is_master
    NpzDeserializer(writer.target).load(other)
    assert (other.epoch, other.current_position, other.is_new_epoch) == (1, 2, True)
    assert type(other.epoch) is int and type(other.epoch_detail) is float
    assert other.actual_iterator.epoch == is_master
    if is_master:
        assert next(other) == next(one)
    ended = []
    one.actual_iterator.finalize = lambda: ended.append(True)
    one.finalize()
    assert ended == [True] * is_master


@each(seed=[None, 6], has_sampler=[True, False])
def test_iterators_of_another_library_are_set_to_one_order(seed, has_sampler):
    class Foreign:
        dataset, batch_size, resets = [1, 2, 3], 2, 0

        def reset(self):
            self.resets += 1

    one = Foreign()
    one.order_sampler = sampler = len if has_sampler else None
    if seed is not None:
        one.seed = seed
    assert iterators.create_synchronized_iterator(one, create_communicator("single")) is one
    assert one.resets == has_sampler
    if has_sampler:
        assert type(one.order_sampler) is ShuffleOrderSampler and one.order_sampler.seed == (seed or 0)
    else:
        assert one.order_sampler is sampler is None


class OfAnotherLibrary:
    batch_size, dataset = 4, range(10)

    def __init__(self, sampler):
        self.order_sampler, self.resets, self.seed = sampler, 0, 7

    def reset(self):
        self.resets += 1


def test_iterators_of_other_libraries_start_over_in_our_order():
    comm = create_communicator("single")
    shuffled, plain = OfAnotherLibrary(object()), OfAnotherLibrary(None)
    assert iterators_of_ranks.create_synchronized_iterator(shuffled, comm) is shuffled
    sampler = shuffled.order_sampler
    assert type(sampler) is iterators_of_ranks.ShuffleOrderSampler and shuffled.resets == 1
    assert sorted(sampler(np.arange(10), 0)) == list(range(10))
    iterators_of_ranks.create_synchronized_iterator(plain, comm)
    assert plain.order_sampler is None and plain.resets == 0
