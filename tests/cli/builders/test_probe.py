"""Tests of dbrdist.cli.builders.probe."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.builders import probe
from dbrdist.core.array import random
from dbrdist.core.array.config import config
from dbrdist.core.model.reporter import report
from dbrdist.errors import ConfigError, CorruptExampleError
from dbrdist.links import Linear

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.mark.parametrize(("length", "number", "reads"), [(150, 1, 100), (150, 40, 3), (7, 4, 2), (0, 4, 0)])
def test_a_hundred_examples_are_tried_where_all_are_corrupt(monkeypatch, length, number, reads):
    read = []
    monkeypatch.setattr(
        probe, "get_batch", lambda data, indices, seed, epoch, skipped: read.append(list(indices)) or []
    )
    settings = SimpleNamespace(seed=3, transforms=SimpleNamespace(train=()))
    look = probe.Look(settings, ORIGIN, "train", range(length), None, None)
    assert look.arguments(number) is None and len(read) == reads
    assert [i for indices in read for i in indices] == list(range(min(length, reads * number)))


def look(part="train", data=range(9), convert=lambda batch, device: batch, transforms=("flip",)):
    settings = SimpleNamespace(seed=3, transforms=SimpleNamespace(**{part: transforms}))
    return probe.Look(settings, ORIGIN, part, data, convert, "device")


def raising(error):
    def fail(*words):
        raise error

    return fail


@pytest.mark.parametrize("part", ["train", "test"])
def test_mistakes_in_examples_point_at_what_made_them(monkeypatch, part):
    words = {"train": "training", "test": "test"}[part]
    monkeypatch.setattr(probe, "last_line", lambda error: f"last {error}")
    for transforms, key in ((("flip",), f"transforms.{part}"), ((), "data")):
        monkeypatch.setattr(probe, "get_batch", raising(ValueError("odd")))
        with pytest.raises(ConfigError) as caught:
            look(part, transforms=transforms).arguments(4)
        assert str(caught.value) == f"run.yaml:{key}: {key}: reading a {words} example failed: last odd"
    monkeypatch.setattr(probe, "get_batch", lambda *words: [1])
    with pytest.raises(ConfigError) as caught:
        look(part, convert=raising(ValueError("ragged"))).arguments(4)
    assert str(caught.value) == f"run.yaml:data: data: {words} examples cannot be made into a batch: last ragged"
    with pytest.raises(MemoryError):
        look(part, convert=raising(MemoryError())).arguments(4)
    monkeypatch.setattr(probe, "get_batch", raising(MemoryError()))
    with pytest.raises(MemoryError):
        look(part).arguments(4)
    monkeypatch.setattr(probe, "get_batch", raising(CorruptExampleError("torn")))
    assert look(part).arguments(4) is None  # the run says so when it comes to it


def test_the_first_examples_that_can_be_read_are_looked_at_as_in_the_first_epoch(monkeypatch):
    asked = []

    def read(data, indices, seed, epoch, skipped):
        asked.append((list(indices), seed, epoch, skipped))
        return [] if len(asked) == 1 else list(indices)

    monkeypatch.setattr(probe, "get_batch", read)
    converted = []
    found = look(convert=lambda batch, device: converted.append((batch, device)) or (1, 2)).arguments(4)
    assert asked == [([0, 1, 2, 3], 3, 0, []), ([4, 5, 6, 7], 3, 0, [])] and converted == [([4, 5, 6, 7], "device")]
    assert found == ((1, 2), {})


class Net(Linear):
    """Draws a number, reports a value, and notes the mode in which it is called."""

    error = None

    def forward(self, x, scale=1.0):
        self.seen = config.train, config.enable_backprop
        random.drawn()
        random.next_initializer_generator()
        report({"loss": 1.0}, self)
        if self.error is not None:
            raise self.error
        return super().forward(x)


def test_a_look_through_a_network_leaves_chance_and_mode_as_they_were():
    net, one = Net(2, 1), look()
    random.set_stream(3, 7, 0, 0)
    state = random.get_state()
    result = one.through(net, np.ones((4, 2), np.float32))
    assert result.shape == (4, 1) and result.creator is None and net.seen == (False, False)
    assert random.get_state() == (*state[:5], state[5] + 1, *state[6:])  # initial values stay drawn
    assert one.observed == {"main/loss"} and config.train


@pytest.mark.parametrize("error", [ValueError("odd"), TypeError("odd"), IndexError("odd")])
def test_what_fails_in_a_network_is_said_with_the_shapes_that_it_got(monkeypatch, error):
    monkeypatch.setattr(probe, "last_line", lambda error: f"last {error}")
    net = Net(2, 1)
    net.error = error
    x, y = np.ones((4, 2), np.float32), np.zeros(4, np.int64)
    for args, shapes in (((x,), "float32 (4, 2)"), ((x, y), "float32 (4, 2) and int64 (4,)")):
        with pytest.raises(ConfigError) as caught:
            look().through(net, *args)
        assert str(caught.value) == f"run.yaml:model: model: computing a training batch of {shapes} failed: last odd"
    net.error = RuntimeError("other")
    with pytest.raises(RuntimeError):
        look().through(net, x)


def test_parameters_get_their_shapes_from_one_example(monkeypatch):
    called = []
    task = object()
    one = SimpleNamespace(
        arguments=lambda number: called.append(number) or ((1, 2), {"a": 3}),
        through=lambda link, *args, **named: called.append((link, args, named)),
    )
    probe.initialize(one, task)
    assert called == [1, (task, (1, 2), {"a": 3})]
    called.clear()
    one.arguments = lambda number: None
    probe.initialize(one, task)
    assert called == []
