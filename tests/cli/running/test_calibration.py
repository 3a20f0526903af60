"""The speed of ranks that compute at the same time: the slowest of several, and processes of their own."""

import contextlib
import io
import itertools
import json
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.builders import assemble
from dbrdist.cli.configuration import resolve
from dbrdist.cli.running import calibration, rehearsal
from dbrdist.errors import ConfigError
from tests.cli.config_helpers import configured
from tests.each import each

CONFIG = (
    "model: {name: resnet20, num_classes: 4}",
    "transforms: {train: [{name: random_resized_crop, size: 8}, {name: normalize, mean: [0.5], std: [0.2]}]}",
)


@each(ranks=[1, 2, 3, 1000])
def test_the_slowest_of_several_draws(ranks):
    times = [0.3, 0.1, 0.7, 0.2]
    if ranks == 1000:
        expected = 0.7
    else:
        expected = np.mean([max(draws) for draws in itertools.product(times, repeat=ranks)])
    assert calibration.of_slowest(times, ranks) == pytest.approx(expected)
    assert calibration.of_slowest(times, ranks, 0.5) == pytest.approx(expected)
    assert calibration.of_slowest(times, ranks, 16) == pytest.approx(0.325 + (expected - 0.325) / 4)


def made(folder, model=CONFIG[0]):
    rehearsal.make_photographs(str(folder))
    data = f"data: {{name: image_folder, root: {folder}, train: train, test: null}}"
    config, origin = configured(model, CONFIG[1], data)
    return config, origin, assemble.parts(config, origin, 0, 1)


@pytest.mark.slow
def test_as_many_processes_as_ranks_or_cores(tmp_path, monkeypatch):
    config, origin, parts = made(tmp_path)
    monkeypatch.setattr(calibration, "available_cores", lambda: 2)
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    alone = calibration.measure(config, origin, parts, 1, 3)
    assert (alone.num_processes, len(alone.computation), len(alone.update), alone.num_examples) == (1, 5, 5, 3)
    both = calibration.measure(config, origin, parts, 8, 3)
    assert (both.num_processes, both.num_threads) == (2, 1)
    assert len(both.computation) == len(both.update) >= 10
    assert min(both.computation + both.update) > 0


@pytest.mark.slow
def test_processes_find_the_user_s_modules_where_this_one_does(tmp_path, monkeypatch):
    """Beside the configuration; and a file of the working folder by the name of one of Python's is not taken for it."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    text = (
        "def make():\n    return dbrdist.Sequential(lambda x: x.reshape(len(x), -1), dbrdist.links.Linear(None, 4))\n"
    )
    (beside / "network_beside_it.py").write_text(f"import dbrdist\nimport dbrdist.links\n{text}")
    (here / "queue.py").write_text("raise ImportError('the wrong queue')\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    resolve.search_beside(str(beside / "config.yaml"))
    monkeypatch.setattr(calibration, "available_cores", lambda: 2)
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    config, origin, parts = made(tmp_path / "images", "model: {name: 'network_beside_it:make'}")
    assert calibration.measure(config, origin, parts, 2, 3).num_processes == 2


@each(**{"given, expected": [(None, 2), ("1", 1), ("3", 3), ("0", 2), ("3,1", 3)]})
def test_threads_are_those_that_the_user_has_set(monkeypatch, given, expected):
    """As in the job, whose ranks leave OMP_NUM_THREADS alone; the sentence about the speed names their number."""
    told = []

    def process(num_threads):
        told.append(num_threads)
        raise ConfigError("enough")

    monkeypatch.setattr(calibration, "available_cores", lambda: 4)
    monkeypatch.setattr(calibration, "_process", process)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with pytest.raises(ConfigError, match="enough"):
        calibration.measure(configured(*CONFIG)[0], None, None, 2, 3)
    assert told == [expected]


@pytest.mark.slow
def test_a_process_whose_starter_is_gone_measures_nothing(tmp_path):
    with calibration._process(1) as process:
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait() == 0
        process.stdin = None
    config, origin, _ = made(tmp_path)
    given = pickle.dumps((config.model_dump(mode="python"), origin, 3))
    with calibration._process(1) as process:
        calibration._tell(process, given)
        assert calibration._hear(process) == b"ready\n"
        assert os.getsid(process.pid) != os.getsid(0)  # a Ctrl-C does not reach it
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait() == 0
        process.stdin = None


@pytest.mark.slow
def test_a_process_that_fails_is_named(tmp_path, monkeypatch, capfd):
    config, origin, parts = made(tmp_path)
    monkeypatch.setattr(calibration, "available_cores", lambda: 2)
    gone = config.model_copy(update={"data": config.data.model_copy(update={"root": str(tmp_path / "gone")})})
    with pytest.raises(ConfigError, match=r"a process that measures has ended with code 1; .*--examples-per-second"):
        calibration.measure(gone, origin, parts, 2, 3)
    assert "gone" in capfd.readouterr().err


@each(
    **{
        "computing, updating, num_steps": [
            (0.25, 0.125, 5),  # five at least, though a second has passed
            (0.125, 0.0625, 6),  # the sixth begins after 15/16 of a second, a seventh would after 18/16
            (0.00390625, 0.00390625, 100),  # a hundred at most
        ]
    }
)
def test_steps_are_timed_for_a_second_after_two_others(monkeypatch, computing, updating, num_steps):
    clock, read, steps = [0.0], [], [0]

    def passes(seconds):
        clock[0] += seconds * (7 if steps[0] < 2 else 1)  # the first ones take longer

    def update():
        passes(updating)
        steps[0] += 1

    network = Network(lambda: passes(computing))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration.build_updates, "optimizer", lambda *args: SimpleNamespace(update=update))
    monkeypatch.setattr(calibration, "reporter", lambda task: contextlib.nullcontext())
    monkeypatch.setattr(
        calibration, "get_batch", lambda data, wanted, seed, epoch, skipped: read.append((epoch, *wanted))
    )
    data = SimpleNamespace(train=range(3))
    made = SimpleNamespace(task=network, data=data, convert=lambda batch, device: (1, 2), device=None)
    for threads, workers, num_read in ((0, 0, num_steps + 3), (2, 0, 1), (0, 2, 1)):
        steps[0] = 0
        read.clear()
        config = SimpleNamespace(threads=threads, workers=workers)
        found = calibration._steps(config, None, made, 4)
        assert found == ((computing,) * num_steps, (updating,) * num_steps)
        assert read == [(0, 0, 1, 2, 0), *[(k, 0, 1, 2, 0) for k in range(num_read - 1)]]


class Network:
    """Takes its time in backward."""

    def __init__(self, backward):
        self.backward = backward
        self.cleargrads = lambda: None

    def __call__(self, *batch):
        assert batch == (1, 2)
        return self


@each(**{"data, told": [(b"", []), (b"given", [b"ready\n"]), (b"given, go", [b"ready\n", b"measured\n"])]})
def test_what_a_process_that_measures_hears_and_answers(monkeypatch, data, told):
    """It answers where its output was, to which the user's program cannot write any more."""
    happened, answers = [], []
    config, origin = configured(*CONFIG)
    given = pickle.dumps((config.model_dump(mode="python"), origin, 3)) if data else b""
    sent = len(given).to_bytes(8) + given + (b"\0" * 8 if data.endswith(b"go") else b"")
    monkeypatch.setattr(calibration.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent)))
    monkeypatch.setattr(calibration.os, "dup", lambda number: happened.append(("dup", number)) or 9)
    monkeypatch.setattr(calibration.os, "dup2", lambda *numbers: happened.append(numbers))
    monkeypatch.setattr(calibration.os, "write", lambda number, text: answers.append((number, text)))
    monkeypatch.setattr(calibration.assemble, "parts", lambda config, origin, *words: ("parts", *words))
    monkeypatch.setattr(calibration, "_steps", lambda *words: happened.append(words) or (("a",), ("b",)))
    calibration.serve()
    assert happened[:2] == [("dup", 1), (2, 1)]
    lines = [b"ready\n", json.dumps([["a"], ["b"]]).encode() + b"\n"][: len(told)]
    assert answers == [(9, line) for line in lines]
    if len(told) == 2:
        ((config_, origin_, parts, number),) = happened[2:]
        assert (config_, parts, number) == (config, ("parts", 0, 1), 3) and type(origin_) is type(origin)
    monkeypatch.setattr(calibration.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent)))
    monkeypatch.setattr(calibration.os, "write", lambda number, text: (_ for _ in ()).throw(BrokenPipeError()))
    calibration.serve()  # nobody listens any more


def test_all_processes_are_ready_before_the_first_one_measures(monkeypatch):
    happened, config = [], configured(*CONFIG)[0]

    @contextlib.contextmanager
    def process(num_threads):
        number = sum(one[0] == "start" for one in happened)
        happened.append(("start", num_threads))
        yield number
        happened.append(("end", number))

    def hear(process):
        happened.append(("hear", process))
        is_ready = sum(one == ("hear", process) for one in happened) == 1
        return b"ready\n" if is_ready else json.dumps([[0.5 + process, 1.5], [0.25 * process]]).encode()

    monkeypatch.setattr(calibration, "available_cores", lambda: 3)
    monkeypatch.setattr(calibration, "_process", process)
    monkeypatch.setattr(calibration, "_hear", hear)
    monkeypatch.setattr(calibration, "_tell", lambda process, data: happened.append(("tell", process, data)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = calibration.measure(config, "origin", None, 2, 7)
    given = pickle.dumps((config.model_dump(mode="python"), "origin", 7))
    assert happened == [
        ("start", 1), ("start", 1), ("tell", 0, given), ("tell", 1, given), ("hear", 0), ("hear", 1),
        ("tell", 0, b""), ("tell", 1, b""), ("hear", 0), ("hear", 1), ("end", 1), ("end", 0),
    ]  # fmt: skip
    assert found == calibration.Times((0.5, 1.5, 1.5, 1.5), (0.0, 0.25), 7, 2, 1)
