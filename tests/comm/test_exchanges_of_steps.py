"""What extensions of several ranks exchange at a step, and what they make of it, seen from one rank."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator, extensions, iterators
from dbrdist.core.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.datasets.order import ShuffleOrderSampler
from dbrdist.errors import CommunicatorError, NonFiniteLossError, StopRequested
from dbrdist.iterators import SerialIterator
from dbrdist.training.triggers import IntervalTrigger
from tests.each import each

SECONDS = extensions._SECONDS
VALUES = {"main/loss": 2.0, "count": 3.0}


class Exchange:
    """In place of Observations: what is handed in, and what comes out."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def average(self, numbers, num_samples, error):
        self.asked.append((dict(numbers), num_samples, error))
        if error is not None:
            raise error
        return {**numbers, "of all": 5.0, **({} if self.seconds is None else {SECONDS: self.seconds})}


def agreement(size=1, rank=0, virtual=None, seconds=None, num_read=4, **options):
    iterator = SimpleNamespace(num_read=num_read, virtual_workers=virtual)
    made = extensions.StepAgreement(SimpleNamespace(size=size, rank=rank), iterator, **options)
    made._observations = Exchange(seconds)
    made._failure = SimpleNamespace(complaint=lambda trainer: "the loss is bad")
    return made


def observed(**values):
    return SimpleNamespace(observation={k.replace("_", "/"): v for k, v in values.items()}, elapsed_time=12.5)


@each(
    **{"size, rank, virtual, shares, sent": [
        (1, 0, None, False, None), (1, 0, None, True, {**VALUES, SECONDS: 12.5}),
        (2, 0, None, False, VALUES), (2, 1, None, False, VALUES),
        (2, 0, None, True, {**VALUES, SECONDS: 12.5}), (2, 1, None, True, VALUES),
        (1, 0, 4, False, None), (2, 0, 4, False, None), (2, 1, 4, False, None),
        (2, 0, 4, True, {SECONDS: 12.5}), (2, 1, 4, True, {}), (1, 0, 4, True, {SECONDS: 12.5}),
    ]}
)  # fmt: skip
def test_numbers_of_a_step_are_exchanged_where_there_is_somebody(size, rank, virtual, shares, sent):
    one = agreement(size, rank, virtual, 77.0 if shares else None, shares_time=shares)
    trainer = observed(main_loss=np.float32(2.0), image=np.ones(3), count=3)
    one(trainer)
    assert one._observations.asked == ([] if sent is None else [(sent, 4, None)])
    assert one.elapsed_time(trainer) == (77.0 if shares else 0.0)
    assert SECONDS not in trainer.observation and ("of all" in trainer.observation) == (sent is not None)
    assert (
        trainer.observation["main/loss"] == 2.0
        and trainer.observation["count"] == 3.0
        and trainer.observation["image"].shape == (3,)
    )
    assert extensions.StepAgreement(SimpleNamespace(size=2, rank=0), object())._shares_time is False


@each(size=[1, 2], virtual=[None, 3], shares=[False, True], num_read=[0, 4], loss=[math.nan, np.ones(2), 1.0])
def test_a_loss_that_is_no_number_ends_the_run_on_all(size, virtual, shares, num_read, loss):
    one = agreement(size, 0, virtual, 3.0 if shares else None, num_read, shares_time=shares)
    trainer = observed(main_loss=loss, other=math.nan)
    is_finite = isinstance(loss, float) and math.isfinite(loss)
    if is_finite:
        one(trainer)
    else:
        with pytest.raises(NonFiniteLossError, match=r"^the loss is bad$"):
            one(trainer)
    is_alone = size == 1 and virtual is None
    has_exchanged = shares or not (virtual or (is_alone and is_finite))
    assert [error is None for *_, error in one._observations.asked] == [is_finite] * has_exchanged
    one._failure.complaint = lambda trainer: None  # nothing is wrong with it after all
    one(observed(main_loss=loss))


def test_the_time_stays_where_nobody_says_it():
    one = agreement(2, 1, None, 8.0, shares_time=True)
    one(observed(main_loss=1.0))
    one._observations.seconds = None
    one(observed(main_loss=1.0))
    assert one.elapsed_time(None) == 8.0


# ---- stops


class Stops:
    """The ranks, as an extension that stops sees them."""

    def __init__(self, size, answers, asked):
        self.size, self.rank, self._stop_answers, self._asked, self.shown = size, 0, answers, asked, []

    def _allgather_rows(self, row):
        assert row.dtype == np.int64 and row.shape == (1,)
        self.shown.append(int(row[0]))
        return np.array([[n] for n in self._asked or [row[0]]])


@each(
    **{"size, answers, asked, number, rank": [
        (2, [0, 0], None, 0, None), (2, [0, 15], None, 15, 1), (3, [0, 10, 15], None, 10, 1), (2, None, [0, 15], 15, 1),
        (2, None, [0, 0], 0, None), (1, [15], None, 15, 0),
    ]}
)  # fmt: skip
@each(saves=[False, True])
def test_a_stop_of_any_rank_is_that_of_all(size, answers, asked, number, rank, saves):
    comm = Stops(size, None if answers is None else np.array(answers), asked)
    saved, trainer = [], SimpleNamespace(updater=SimpleNamespace(iteration=7))
    stop = extensions.StopOnRequest(comm, saved.append if saves else None)
    if size == 1:
        stop(trainer)  # nobody has asked
        assert comm._stop_answers is not None
        stop.request(15)
        assert comm._stop_request == 15
    if not number:
        stop(trainer)
    else:
        words = f"^{signal.Signals(number).name} arrived on rank {rank}; all ranks stopped after step 7"
        with pytest.raises(StopRequested, match=words + (" and saved$" if saves else "$")):
            stop(trainer)
    assert saved == [trainer] * bool(saves and number)
    assert comm._stop_answers is None  # those of one step are not those of the next
    assert comm.shown == ([] if answers is not None and size > 1 else [15 if size == 1 else 0])


# ---- values of all ranks


class Gathering:
    """The first of two ranks, where the other one has some values."""

    size, rank = 2, 0

    def __init__(self, *theirs):
        self.theirs, self.mine = list(theirs), []

    def gather_obj(self, x):
        self.mine.append(x)
        return [x, self.theirs.pop(0)]


def test_values_are_collected_until_ranks_meet(monkeypatch):
    monkeypatch.setattr(extensions, "on_root", lambda comm, function: function())
    comm = Gathering([3.0], [], [5.0, 6.0])
    one = extensions.ObservationAggregator(comm, "x", "all", comm_trigger=IntervalTrigger(2, "iteration"))
    trainer = SimpleNamespace(updater=SimpleNamespace(iteration=0), observation={})
    found = []
    for values in ({"x": 1.0}, {"x": np.float32(2.0)}, {}, {}, {"x": 4.0}, {"y": 1.0}):
        trainer.updater.iteration += 1
        trainer.observation = dict(values)
        one(trainer)
        found.append(trainer.observation.get("all"))
    assert comm.mine == [[1.0, 2.0], [], [4.0]] and found == [None, 2.0, None, None, None, 5.0]
    assert (one.trigger, one.priority) == ((1, "iteration"), 200)
    same = extensions.ObservationAggregator(Gathering([]), "x", aggregator=lambda values: values)
    trainer.observation = {"x": 7}
    trainer.updater.iteration += 1
    same(trainer)
    assert trainer.observation == {"x": [[7.0], []]}


def test_when_extensions_of_ranks_are_called():
    called = {
        kind: (kind.trigger, kind.priority)
        for kind in (extensions.StepAgreement, extensions.StopOnRequest, extensions.ObservationAggregator)
    }
    assert list(called.values()) == [((1, "iteration"), 1000), ((1, "iteration"), -1000), ((1, "iteration"), 200)]


# ---- states


class Counting:
    """A trigger that counts who asks."""

    def __init__(self, count=0):
        self.count = count

    def __call__(self, trainer):
        return False

    def serialize(self, serializer):
        self.count = int(serializer("count", self.count))


def restored(first, second):
    writer = DictionarySerializer()
    writer.save(first)
    NpzDeserializer(writer.target).load(second)
    return second


def test_collected_values_and_triggers_are_kept():
    comm = create_communicator("single")
    one = extensions.ObservationAggregator(comm, "x", comm_trigger=Counting(4))
    one._collected = [1.5, 2.5]
    other = restored(one, extensions.ObservationAggregator(comm, "x", comm_trigger=Counting()))
    assert other._collected == [1.5, 2.5] and other._comm_trigger.count == 4
    plain = extensions.ObservationAggregator(comm, "x", comm_trigger=lambda trainer: False)
    assert restored(plain, extensions.ObservationAggregator(comm, "x", comm_trigger=lambda trainer: False)) is not plain

    def stopping(count):
        return extensions.MultiNodeEarlyStoppingTrigger(comm, check_trigger=Counting(count), patience=2)

    stop = stopping(3)
    stop._aggregator._collected, stop._actual.best, stop._actual.count = [7.0], 0.5, 1
    found = restored(stop, stopping(0))
    assert found._aggregator._collected == [7.0] and (found._actual.best, found._actual.count) == (0.5, 1)
    assert found._aggregator._comm_trigger.count == found._actual._check_trigger.count == 3
    assert found._aggregator._comm_trigger is not found._actual._check_trigger  # each counts its own calls


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


def test_one_rank_has_nobody_to_share_with(monkeypatch):
    monkeypatch.setattr(iterators.agree, "same_everywhere", lambda *arguments: None)
    iterators.check_shares(SimpleNamespace(size=1), SerialIterator([1, 2], 1, rank=0, size=1))
    rows = SimpleNamespace(size=2, _allgather_rows=lambda row: np.array([[1], row[:]]))
    iterators.check_shares(rows, SerialIterator([1, 2], 2, rank=0, size=2))
    with pytest.raises(CommunicatorError, match=r"got rank=1 on ranks 0, 1; make them with rank=comm\.rank"):
        iterators.check_shares(rows, SerialIterator([1, 2], 2, rank=1, size=2))


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
