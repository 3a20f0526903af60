"""DaliIterator on a stand-in for a DALI pipeline."""

import numpy as np
import pytest

import dbrdist
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.dataset import concat_examples
from dbrdist.iterators import DaliIterator
from dbrdist.training import Trainer
from dbrdist.training.updaters import StandardUpdater


class Pipeline:
    """What the iterator asks of DALI."""

    def __init__(self, n=10, batch_size=4, sizes=dict, name="max_batch_size"):
        setattr(self, name, batch_size)
        self.n, self.sizes, self.num_built, self.at = n, sizes, 0, 0
        self.size = batch_size

    def build(self):
        self.num_built += 1

    def epoch_size(self):
        assert self.num_built
        return {"reader": self.n} if self.sizes is dict else self.n

    def run(self):
        indices = (self.at + np.arange(self.size)) % self.n
        self.at += self.size
        return (indices.astype(np.float32)[:, None], indices)


@pytest.mark.parametrize("arguments", [{}, {"sizes": int}, {"name": "batch_size"}])
def test_counters(arguments):
    pipeline = Pipeline(**arguments)
    iterator = DaliIterator(pipeline)
    assert iterator.epoch_detail == 0 and iterator.previous_epoch_detail is None and pipeline.num_built == 0
    seen = []
    for _ in range(5):
        _, indices = iterator.next()
        seen.append((indices[0], iterator.epoch, iterator.current_position, iterator.is_new_epoch))
    assert seen == [(0, 0, 4, False), (4, 0, 8, False), (8, 1, 2, True), (2, 1, 6, False), (6, 2, 0, True)]
    assert iterator.epoch_detail == 2.0 and iterator.previous_epoch_detail == 1.6 and pipeline.num_built == 1
    assert iterator.batch_size == 4 and iterator.repeat
    iterator.reset()
    assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (0, 0, None)


def test_one_epoch():
    with DaliIterator(Pipeline(), repeat=False) as iterator:
        assert len(list(iterator)) == 3 and iterator.epoch == 1 and iterator.epoch_detail == 1
        with pytest.raises(StopIteration):
            iterator.next()


def test_counters_are_saved():
    iterator = DaliIterator(Pipeline())
    for _ in range(4):
        iterator.next()
    saved = DictionarySerializer()
    iterator.serialize(saved)
    other = DaliIterator(Pipeline())
    other.serialize(NpzDeserializer(saved.target))
    assert vars(other) | {"pipeline": 0, "_epoch_size": 0} == vars(iterator) | {"pipeline": 0, "_epoch_size": 0}
    assert other.epoch_detail == 1.6 and other.previous_epoch_detail == 1.2


def test_the_start_and_the_end_of_an_epoch_are_told_apart_and_saved():
    iterator = DaliIterator(Pipeline(n=8))
    assert iterator.is_new_epoch is False
    iterator.next()
    assert iterator.previous_epoch_detail == 0.0 and iterator.epoch_detail == 0.5
    iterator.next()
    assert iterator.is_new_epoch and iterator.previous_epoch_detail == 0.5
    saved, other = DictionarySerializer(), DaliIterator(Pipeline(n=8))
    iterator.serialize(saved)
    other.serialize(NpzDeserializer(saved.target))
    assert other.is_new_epoch is True and other.epoch == 1
    other.reset()
    assert other.is_new_epoch is False
    single = DaliIterator(Pipeline(n=1, batch_size=1))
    single.next()
    assert single.epoch_size == 1 and single.epoch_detail == 1.0


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(TypeError, match=r"expected a DALI pipeline, got list, which has no build\(\)"):
        DaliIterator([1])
    with pytest.raises(ValueError, match="a reader that has examples"):
        DaliIterator(Pipeline(n=0)).next()


def test_a_trainer_runs_on_it():
    model = dbrdist.links.Linear(1, 1)
    optimizer = dbrdist.optimizers.SGD(0.001).setup(model)

    def convert(batch, device):
        return concat_examples(list(zip(*batch)), device)[0]

    def loss(x):
        return dbrdist.functions.sum(model(x) ** 2)

    updater = StandardUpdater(DaliIterator(Pipeline()), optimizer, converter=convert, loss_func=loss)
    Trainer(updater, (2, "epoch")).run()
    assert updater.iteration == 5 and updater.epoch == 2
