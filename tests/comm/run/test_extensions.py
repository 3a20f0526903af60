"""Tests of dbrdist.comm.run.extensions."""

from __future__ import annotations

import contextlib
import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.run import extensions
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import NonFiniteLossError, StopRequested
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


class Stops:
    """The ranks, as an extension that stops sees them."""

    def __init__(self, size, answers, asked):
        self.size, self.rank, self._asked, self.shown = size, 0, asked, []
        self.stop, self.gate = SimpleNamespace(answers=answers), self

    def allgather_rows(self, row):
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
        assert comm.stop.answers is not None
        stop.request(15)
        assert comm.stop.request == 15
    if not number:
        stop(trainer)
    else:
        words = f"^{signal.Signals(number).name} arrived on rank {rank}; all ranks stopped after step 7"
        with pytest.raises(StopRequested, match=words + (" and saved$" if saves else "$")):
            stop(trainer)
    assert saved == [trainer] * bool(saves and number)
    assert comm.stop.answers is None  # those of one step are not those of the next
    assert comm.shown == ([] if answers is not None and size > 1 else [15 if size == 1 else 0])


class Gathering:
    """The first of two ranks, where the other one has some values."""

    size, rank = 2, 0

    def __init__(self, *theirs):
        self.theirs, self.mine = list(theirs), []

    def gather_obj(self, x):
        *keys, mine = x
        self.mine.append(mine)
        return [x, (*keys, self.theirs.pop(0))]


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


@each(is_done=[True, False], shares_time=[True, False], loss=[1.0, np.nan], rank=[0, 1])
def test_what_ranks_tell_each_other_of_a_step(monkeypatch, is_done, shares_time, loss, rank):
    asked = []

    def average(numbers, num_samples, error):
        asked.append((dict(numbers), num_samples))
        if error is not None:
            raise error
        return {key: value + 1 for key, value in numbers.items()}

    comm = SimpleNamespace(size=2, rank=rank)
    iterator = SimpleNamespace(num_read=4, virtual_workers=3 if is_done else None)
    one = extensions.StepAgreement(comm, iterator, shares_time)
    one._observations = SimpleNamespace(average=average)
    one._failure = SimpleNamespace(complaint=lambda trainer: "it is not finite")
    trainer = SimpleNamespace(observation={"loss": loss, "x": np.array(2.0)}, elapsed_time=50.0)
    is_finite = np.isfinite(loss)
    with contextlib.nullcontext() if is_finite else pytest.raises(NonFiniteLossError, match="it is not finite"):
        one(trainer)
    is_told = shares_time or not is_done
    numbers = {} if is_done else {"loss": loss, "x": 2.0}
    clock = {extensions._SECONDS: 50.0} if shares_time and rank == 0 else {}
    assert len(asked) == is_told
    if is_told:
        assert asked[0][0].keys() == {*numbers, *clock} and asked[0][1] == 4 and asked[0][0].items() >= clock.items()
    if is_finite:
        assert trainer.observation == ({"loss": 1.0, "x": 2.0} if is_done else {"loss": 2.0, "x": 3.0})
        assert one.elapsed_time(trainer) == (51.0 if clock else 0.0)


@each(**{"answers, size, is_asked": [(None, 2, True), ([0, 15], 2, False), ([15], 1, True)]})
def test_signals_are_asked_for_where_no_header_told_them(answers, size, is_asked):
    asked = []
    comm = SimpleNamespace(
        size=size,
        stop=SimpleNamespace(answers=answers),
        gate=SimpleNamespace(allgather_rows=lambda row: asked.append(row.tolist()) or np.array([[3, 9], [0, 9]])),
    )
    one = extensions.StopOnRequest(comm)
    one._received = 3
    found = one._numbers()
    assert comm.stop.answers is None and asked == ([[3]] if is_asked else [])
    assert list(found) == ([3, 0] if is_asked else [0, 15])


@each(
    value=[3, 3.0, np.float32(3), np.array(3), Variable(np.array(3.0)), np.array([3.0]), np.zeros(2), "three", None],
    is_alone=[True, False],
)
def test_single_numbers_are_averaged(value, is_alone):
    comm = create_communicator("single")
    iterator = SimpleNamespace(num_read=2)
    one = extensions.StepAgreement(comm, iterator)
    one._is_alone = is_alone
    trainer = SimpleNamespace(observation={"x": value}, elapsed_time=5.0)
    is_number = getattr(value, "ndim", 0) == 0 and not isinstance(value, str | None)
    one(trainer)
    found = trainer.observation["x"]
    if not is_number:
        assert found is value  # it has no mean, of which the log warns
    else:
        assert (type(found) is float and found == 3.0) if not is_alone else True


@each(**{"key, value, is_good": [("loss", np.zeros(2), False), ("x", np.zeros(2), True), ("x", np.nan, True),
                                 ("main/loss", np.inf, False), ("loss", 1.0, True)]})  # fmt: skip
def test_a_loss_is_a_finite_number(key, value, is_good):
    comm = SimpleNamespace(size=2, rank=0)
    one = extensions.StepAgreement(comm, SimpleNamespace(num_read=1))
    errors = []
    one._observations = SimpleNamespace(average=lambda numbers, num_samples, error: errors.append(error) or {})
    one._failure = SimpleNamespace(complaint=lambda trainer: "not finite")
    one(SimpleNamespace(observation={key: value}))
    (error,) = errors
    assert (error is None) == is_good and (is_good or str(error) == "not finite")


@each(collected=[[], [1.5, 2.0]])
def test_what_an_aggregator_has_collected_is_saved(collected):
    one = extensions.ObservationAggregator(create_communicator("single"), "loss", comm_trigger=(1, "epoch"))
    one._collected = collected
    serializer = DictionarySerializer()
    one.serialize(serializer)
    other = extensions.ObservationAggregator(create_communicator("single"), "loss", comm_trigger=(1, "epoch"))
    other._collected = [7.0]
    other.serialize(NpzDeserializer(serializer.target))
    assert other._collected == collected


@each(
    **{
        "key, value, is_good": [
            ("main/loss", np.array(1.5, "f"), True), ("main/loss", np.float32(1.5), True), ("main/loss", 1.5, True),
            ("main/loss", np.array(np.nan), False), ("main/loss", float("inf"), False),
            ("main/loss", np.ones(2), False), ("x", np.ones(2), True), ("x", np.array(np.nan), True), ("x", 3, True),
            ("x", "three", True), ("x", None, True), ("main/loss", None, False), ("x", np.array("three"), True),
        ]
    }
)  # fmt: skip
def test_numbers_that_are_observed_become_floats(key, value, is_good):
    observation = {key: value, "last": np.array(2.0)}
    assert extensions._become_numbers(observation) is is_good
    if getattr(value, "ndim", 0) or value is None or np.asarray(value).dtype.kind == "U":
        assert observation[key] is value
    else:
        assert type(observation[key]) is float
        np.testing.assert_equal(observation[key], float(value))
    if is_good:
        assert type(observation["last"]) is float


@each(**{"verbose, rank, speaks": [(True, 0, True), (True, 1, False), (False, 0, False), (False, 1, False)]})
def test_one_rank_speaks_of_an_early_stop(monkeypatch, verbose, rank, speaks):
    made = []
    monkeypatch.setattr(extensions, "EarlyStoppingTrigger", lambda *args, **options: made.append((args, options)))
    monkeypatch.setattr(extensions, "ObservationAggregator", lambda *args, **options: None)
    comm = SimpleNamespace(rank=rank)
    extensions.MultiNodeEarlyStoppingTrigger(comm, verbose=verbose, patience=3, monitor="m")
    assert made == [(((1, "epoch"), "m_aggregated", 3, "auto", speaks, (100, "epoch")), {})]
