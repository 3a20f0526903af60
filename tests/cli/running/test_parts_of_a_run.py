"""What a run calls after each step, and how it ends: complete lists and texts, without training."""

from __future__ import annotations

import contextlib
import json
import signal
from types import SimpleNamespace

import pytest

from dbrdist.cli.output.console import Console
from dbrdist.cli.output.warned import Warned
from dbrdist.cli.running import run as runs
from dbrdist.comm import create_communicator
from dbrdist.errors import NonFiniteLossError, StopRequested
from dbrdist.training import triggers
from tests.cli.config_helpers import configured
from tests.each import each

END = "the end"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A run of a small network that is not trained."""
    monkeypatch.chdir(tmp_path)

    def make(*lines, continues=False):
        config, origin = configured("model: {name: mlp, units: [4]}", *lines)
        console = Console()
        run = runs.TrainingRun(
            config, origin, create_communicator("single"), console, Warned(0, console), continues=continues
        )
        run.stop.finalize()
        return run

    return make


def told(trigger):
    """When a trigger fires, as plain data."""
    if isinstance(trigger, triggers.AnyTrigger):
        return [told(one) for one in trigger._triggers]
    if isinstance(trigger, triggers.BestValueTrigger):
        return [type(trigger).__name__, trigger._key, *told(trigger._interval_trigger)]
    if isinstance(trigger, triggers.EndTrigger):
        return END
    if isinstance(trigger, triggers.TimeTrigger):
        return trigger.period, "seconds"
    if not triggers.can_fire(trigger):
        return None
    return trigger.period, trigger.unit, *([trigger.offset] if hasattr(trigger, "offset") else [])


def called(run):
    """The extensions by name: trigger and priority, of those that are not called after each step."""
    return {entry.name: (told(entry.trigger), entry.priority) for entry in run.trainer._extensions.values()}


STEP, EPOCH = (1, "iteration"), (1, "epoch")
ALWAYS = {
    "StepAgreement": (STEP, 1000), "LocalState": (None, 100), "observe_value": (STEP, 300), "LogReport": (STEP, 100),
    "PrintReport": (STEP, 100), "ProgressBar": (STEP, 100), "StopOnRequest": (STEP, -1000), "RankState": (STEP, 899),
}  # fmt: skip


def test_what_a_run_calls_by_default(made, monkeypatch):
    run = made()
    evaluated = {
        "FollowSchedule": (None, -99), "AverageStatistics": ([EPOCH, END], 301), "validation": ([EPOCH, END], 300),
        "ShowTestExamples": ([EPOCH, END], 299), "SharedSnapshot": ([EPOCH, END], -100),
    }  # fmt: skip
    assert called(run) == ALWAYS | evaluated
    log, bar = (run.trainer.get_extension(name) for name in ("LogReport", "ProgressBar"))
    assert told(log._trigger) == [EPOCH, END] and log is run.log and log._filename == "log.jsonl"
    assert (bar._update_interval, bar._min_seconds, bar._live, bar._out) == (1, 10.0, False, run.console)
    keys = [column.key for column in run.trainer.get_extension("PrintReport")._columns]
    values = ["main/loss", "main/accuracy", "validation/main/loss", "validation/main/accuracy"]
    assert keys == ["epoch", "iteration", *values, "examples_per_second", "elapsed_time"]
    assert told(run.trainer.stop_trigger) == END and run.trainer.stop_trigger.epochs == 10
    monkeypatch.setattr(runs.beats, "expected", lambda: True)
    beats = {"ProgressBeat": (STEP, 900), "Resume": (STEP, -1100)}
    assert called(made()) == ALWAYS | evaluated | beats


def test_what_a_run_calls_that_does_all_it_can(made):
    every = [(2, "epoch", 1.0), END]
    run = made(
        "ema: 0.9", "audit: true", "parameter_audit: 50 iterations", "evaluation: {every: 2 epochs, offset: 1}",
        "snapshot: {best: validation/main/accuracy, every: 2 epochs or 10 minutes, keep: 3}",
        "log: {every: 5 iterations, csv: true, tensorboard: true}",
        "optimizer: {name: sgd, lr: 0.1, schedule: cosine}",
    )  # fmt: skip
    assert called(run) == ALWAYS | {
        "AuditLog": (STEP, -98), "ParameterAudit": ((50, "iteration"), 100), "FollowSchedule": (STEP, -99),
        "WeightAverage": (STEP, 400), "AverageStatistics": (every, 301), "validation": (every, 300),
        "ShowTestExamples": (every, 299), "TensorBoard": (STEP, -1), "CSVLogger": (STEP, -1),
        "best": (["MaxValueTrigger", "validation/main/accuracy", *every], -100),
        "SharedSnapshot": ([(2, "epoch"), (600.0, "seconds"), END], -100),
    }  # fmt: skip
    assert told(run.trainer.get_extension("LogReport")._trigger) == [(5, "iteration"), END]


def test_a_range_test_calls_no_evaluation_and_saves_nothing(made):
    run = made("lr_finder: {steps: 20}")
    assert called(run) == ALWAYS | {"RangeTest": (STEP, -99)}
    keys = [column.key for column in run.trainer.get_extension("PrintReport")._columns]
    assert keys == ["epoch", "iteration", "main/loss", "main/accuracy", "examples_per_second", "elapsed_time"]


def test_statistics_that_are_measured_anew_come_before_the_evaluation(made):
    run = made("batch_norm: {statistics: recalibrated, batches: 2}", "log: {examples: 0}")
    every = [EPOCH, END]
    assert called(run) == ALWAYS | {
        "FollowSchedule": (None, -99), "recalibration": (every, 302), "validation": (every, 300),
        "SharedSnapshot": (every, -100),
    }  # fmt: skip


@each(
    **{
        "key, mode, kind": [
            ("main/loss", "auto", "MinValueTrigger"), ("main/accuracy", "auto", "MaxValueTrigger"),
            ("main/loss", "max", "MaxValueTrigger"), ("main/accuracy", "min", "MinValueTrigger"),
        ]
    }
)  # fmt: skip
def test_the_best_snapshot_has_the_highest_or_the_lowest_value(key, mode, kind):
    found, comm = [], create_communicator("single")
    trainer = SimpleNamespace(extend=lambda extension, name=None, trigger=None: found.append((name, trigger)))
    config = configured(f"snapshot: {{best: {key}, mode: {mode}, every: 3 iterations}}")[0]
    own = SimpleNamespace(config=config, comm=comm, local=None, saver=None, agreement=None, _writer=lambda: None)
    runs.TrainingRun._snapshots(own, trainer, triggers.EndTrigger(1))
    assert [(name, told(trigger)) for name, trigger in found] == [
        ("best", [kind, key, EPOCH, END]), (None, [(3, "iteration"), END]),
    ]  # fmt: skip
    assert own.best_trigger is found[0][1]


# ---- how a run ends -------------------------------------------------------------------------------------------------


def ended(tmp_path, best=None, log=(), batch_finder=None, range_test=None, accumulate=1, **summary):
    """What is said at the end of a run."""
    said = []
    config = SimpleNamespace(
        accumulate=accumulate, snapshot=SimpleNamespace(best=best), batch_finder=batch_finder, out="runs/a"
    )
    folder = SimpleNamespace(path="runs/a", file=lambda name: str(tmp_path / name))
    own = SimpleNamespace(config=config, folder=folder, log=SimpleNamespace(log=log), range_test=range_test)
    own.say = said.append
    whole = {"num_skipped_examples": 0, "num_skipped_test_examples": 0, "iterations": 7, "status": "finished"}
    runs.TrainingRun._say_end(own, {**whole, "epochs": 1.0, "seconds": 12.34, "metrics": {}, **summary})
    return said


def test_the_last_words_of_a_run(tmp_path):
    last = "finished: 1 epoch, 7 steps in 12.3 s; everything is in runs/a"
    assert ended(tmp_path) == [last]
    assert ended(tmp_path, num_skipped_examples=1, num_skipped_test_examples=2) == [
        "1 corrupt training example left out, see runs/a", "2 corrupt test examples left out, see runs/a", last,
    ]  # fmt: skip
    left = "accumulate: 3 batches left over at step 7, without the update that takes 4"
    assert ended(tmp_path, accumulate=4) == [left, last] and ended(tmp_path, accumulate=7) == [last]
    stopped = "stopped: 2.5 epochs, 1 step in 0.0 s; everything is in runs/a"
    assert ended(tmp_path, accumulate=4, status="stopped", epochs=2.5, iterations=1, seconds=0.04) == [stopped]
    assert ended(tmp_path, metrics={"validation/main/accuracy": 0.98765}) == [last, "test accuracy 98.77 %"]
    none = "snapshot.best: no snapshot_best was saved, because nothing was observed as 'main/x'"
    assert ended(tmp_path, "main/x", [{"main/loss": 1.0}]) == [none, last]
    nan = "snapshot.best: no snapshot_best was saved, because 'main/x' was NaN each time"
    assert ended(tmp_path, "main/x", [{"main/loss": 1.0}, {"main/x": 1.0}]) == [nan, last]
    assert ended(tmp_path, "main/x", range_test=object()) == [last]
    finder = "finished in 12.3 s; everything is in runs/a"
    assert ended(tmp_path, "main/x", batch_finder=object()) == [finder]
    (tmp_path / "snapshot_best").write_text("")
    assert ended(tmp_path, "main/x") == [last]


class Own:
    """A run that notes what its end calls."""

    def __init__(self, rank=0, range_test=None, error=None):
        self.calls, self.summary = [], {"status": "?"}
        self.comm = SimpleNamespace(rank=rank, size=1)
        self.range_test, self.error = range_test, error
        self.folder = SimpleNamespace(
            path="runs/a", write_status=self.write_status, close=self.note("close folder"), summary=self.summary
        )
        self.console = SimpleNamespace(log=self.note("log"), close=self.note("close console"))
        self.say, self._say_end = self.note("say"), self.note("end")
        self._write_report, self._finish_test = self.note("report"), self.note("test")

    def note(self, what):
        return lambda *words: self.calls.append((what, *words))

    def results(self, seconds):
        return {"seconds": seconds}

    def write_status(self, *words, **results):
        self.calls.append(("status", *words, results))
        if self.error is not None:
            raise self.error


@each(
    **{
        "status, has_test, words": [
            ("finished", False, [("end", {"status": "?"})]), ("stopped", True, [("end", {"status": "?"})]),
            ("finished", True, [("test", "range test"), ("end", {"status": "?"})]),
            ("failed", True, [("log", "failed: why")]),
        ]
    }
)  # fmt: skip
def test_what_rank_0_writes_at_the_end(monkeypatch, status, has_test, words):
    monkeypatch.setattr(runs, "now", lambda: "today")
    own = Own(range_test="range test" if has_test else None)
    runs.TrainingRun._end(own, status, "why", 1.5, {"num_skipped_examples": 0})
    results = {"seconds": 1.5, "num_skipped_examples": 0, "ended": "today"}
    closes = [("report",), ("close console",), ("close folder",)]
    assert own.calls == [("status", status, "why", results), *words, *closes]


def test_a_disk_that_is_full_at_the_end_and_other_ranks():
    own = Own(error=OSError(28, "No space left on device"))
    runs.TrainingRun._end(own, "failed", "why", 1.5, {})
    said = ("say", "runs/a: the summary could not be written: No space left on device")
    assert own.calls[1:] == [said, ("log", "failed: why"), ("report",), ("close console",), ("close folder",)]
    own = Own(rank=1)
    runs.TrainingRun._end(own, "finished", None, 1.5, {})
    assert own.calls == [("close folder",)]


class Trained(Own):
    """A run whose training ends in some way."""

    def __init__(self, error=None, reason=None, losses=None, finder=None):
        super().__init__(range_test=None if losses is None else SimpleNamespace(losses=[1.0] * losses))
        self.raised, self.need, self.free_on_gpu = error, None, None
        settings = SimpleNamespace(background=False)
        self.config = SimpleNamespace(batch_finder=finder, snapshot=settings)
        self.trainer = SimpleNamespace(run=self.run, stop_trigger=SimpleNamespace(reason=reason))
        self.warned = SimpleNamespace(
            say_own=self.note("own warnings"), gather=lambda comm: self.calls.append("warnings")
        )
        self.folder.has = lambda path: False
        self._ends_a_test = lambda error: runs.TrainingRun._ends_a_test(self, error)
        self._skipped = lambda: {"skipped": 1}

    def run(self, show_loop_exception_msg):
        assert not show_loop_exception_msg
        if self.raised is not None:
            raise self.raised

    def _end(self, status, reason, seconds, skipped):
        assert 0 <= seconds < 60
        self.calls.append(("end", status, reason, skipped))


def test_a_batch_that_fits_is_noted_where_memory_ran_out(monkeypatch):
    noted, own = [], Trained(MemoryError("no room"))
    monkeypatch.setattr(runs.memory, "note_batch", lambda *words: noted.append(words))
    with pytest.raises(BaseException, match="no room"):
        runs.TrainingRun.train(own, traces=False)
    assert noted == [(own.raised, None, own.config, 1, None)]


def trained(*args, **options):
    own = Trained(*args, **options)
    code = runs.TrainingRun.train(own, traces=False)
    return code, own.calls


def test_codes_and_reasons_of_runs_that_end():
    whole = {"skipped": 1}
    assert trained() == (0, ["warnings", ("end", "finished", None, whole)])
    assert trained(reason="good enough") == (
        0, [("say", "good enough"), "warnings", ("end", "finished", "good enough", whole)]
    )  # fmt: skip
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        request = StopRequested("asked to stop", number)
        said = [("say", str(request)), "warnings", ("end", "stopped", str(request), whole)]
        assert trained(request) == (code, said)
    nan = NonFiniteLossError("main/loss is nan")
    reason = "NonFiniteLossError: main/loss is nan"
    assert trained(nan, losses=10) == (0, ["warnings", ("end", "finished", reason, whole)])
    for losses, error in ((9, nan), (None, nan), (10, ZeroDivisionError("x"))):
        own = Trained(error, losses=losses)
        with pytest.raises(Exception) as caught:
            runs.TrainingRun.train(own, traces=False)
        words = f"{type(error).__name__}: {error}"
        assert own.calls == [("own warnings",), ("end", "failed", words, {})] and str(error) in str(caught.value)


def test_a_search_for_a_batch_takes_the_place_of_training(monkeypatch):
    found = []
    monkeypatch.setattr(runs.batch_finder, "find", found.append)
    own = Trained(RuntimeError("trained"), finder=object())
    assert runs.TrainingRun.train(own, traces=False) == 0 and found == [own]


def test_examples_that_were_left_out_are_named_once():
    """By two ranks, of which each has its list; a thousand names at most."""
    comm = SimpleNamespace(allgather_obj=lambda mine: [mine, ["b", "c"]])
    own = SimpleNamespace(comm=comm, local=SimpleNamespace(skipped=["a", "b", "a"]), test_iterator=None)
    assert runs.TrainingRun._skipped(own) == {
        "num_skipped_examples": 3, "skipped_examples": ["a", "b", "c"], "num_skipped_test_examples": 2,
        "skipped_test_examples": ["b", "c"],
    }  # fmt: skip
    own.test_iterator = SimpleNamespace(skipped=[str(k) for k in range(1001)])
    found = runs.TrainingRun._skipped(own)
    assert (found["num_skipped_test_examples"], len(found["skipped_test_examples"])) == (1003, 1000)


def test_files_that_cannot_be_written_at_the_end_are_said(monkeypatch):
    said, full = [], OSError(28, "No space left on device")

    def fail(*args):
        raise full

    own = SimpleNamespace(folder=SimpleNamespace(path="runs/a", file=lambda name: name), say=said.append)
    monkeypatch.setattr(runs.report, "write", fail)
    monkeypatch.setattr(runs.trace, "write", fail)
    monkeypatch.setattr(runs.trace, "summarize", lambda ranks: SimpleNamespace(lines=lambda: ["steps wait for data"]))
    runs.TrainingRun._write_report(own)
    runs.TrainingRun._finish_test(own, SimpleNamespace(finish=fail))
    runs.TrainingRun._write_trace(own, SimpleNamespace(finish=lambda: None))  # of another rank than rank 0
    runs.TrainingRun._write_trace(own, SimpleNamespace(finish=lambda: [1]))
    words = "could not be written: No space left on device"
    parts = [f"runs/a: the {what} {words}" for what in ("report", "range test", "trace")]
    assert said == [*parts[:2], "steps wait for data", parts[2]]


# ---- how a run is made ----------------------------------------------------------------------------------------------


@each(**{"lines, saves": [((), True), (("batch_finder: {}",), False)]})
def test_a_stop_saves_the_run_but_for_a_search_for_a_batch(made, monkeypatch, lines, saves):
    asked = []
    plain = runs.StopOnRequest

    def stop(comm, save):
        asked.append(save)
        return plain(comm, save=save)

    monkeypatch.setattr(runs, "StopOnRequest", stop)
    run = made(*lines)
    assert asked == [run._save if saves else None]
    saved = []
    run.saver = SimpleNamespace(save=saved.append)
    run._save("trainer")
    assert saved == ["trainer"]


def test_a_run_that_cannot_be_made_hears_no_more_requests(made, monkeypatch):
    happened = []
    stop = SimpleNamespace(initialize=lambda trainer: happened.append(("initialize", trainer)),
                           finalize=lambda: happened.append("finalize"))  # fmt: skip
    monkeypatch.setattr(runs, "StopOnRequest", lambda comm, save: stop)
    monkeypatch.setattr(runs, "parts", lambda *words: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        made()
    assert happened == [("initialize", None), "finalize"]


@each(**{"continues, has_snapshot": [(False, False), (False, True), (True, False), (True, True)]})
def test_first_weights_are_read_unless_a_snapshot_has_all(made, monkeypatch, continues, has_snapshot):
    """Their file may be gone by then."""
    asked = []

    def parts(config, origin, local_rank, num_ranks, find):
        asked.append((config.init_from, local_rank, num_ranks))
        raise ZeroDivisionError

    monkeypatch.setattr(runs.snapshots, "find", lambda folder: ["snapshot"] * has_snapshot)
    monkeypatch.setattr(runs, "parts", parts)
    with pytest.raises(ZeroDivisionError):
        made("init_from: weights.npz", continues=continues)
    assert [(weights is None, *more) for weights, *more in asked] == [(continues and has_snapshot, 0, 1)]


def test_what_a_snapshot_says_of_the_data(made):
    run = made()
    facts = run._data_facts()
    some = facts.pop("some_examples")
    assert facts == {"classes": run.parts.data.classes, "num_test_examples": len(run.parts.data.test)}
    assert len(some["train"]) == len(some["test"]) > 16 and json.loads(json.dumps(some)) == some
    run.parts = SimpleNamespace(data=SimpleNamespace(classes=["a"], train=[("b/c.png", 1)], test=None))
    some = {"train": ["c.png", 1.0], "test": []}
    assert run._data_facts() == {"classes": ["a"], "num_test_examples": None, "some_examples": some}


@each(**{"rank, said": [(0, ["words"]), (1, [])]})
def test_rank_0_speaks_for_all(rank, said):
    heard = []
    own = SimpleNamespace(comm=SimpleNamespace(rank=rank), console=SimpleNamespace(say=heard.append))
    runs.TrainingRun.say(own, "words")
    assert heard == said
    own = SimpleNamespace(plan=["a", "b"], say=heard.append)
    heard.clear()
    runs.TrainingRun.announce(own)
    assert heard == ["a", "b"]


@each(**{"is_over, was_told, changes, expected": [
    (True, "finished", [], True), (True, "running", [], False), (True, None, ["x"], True), (True, None, [], False),
    (False, "finished", ["x"], False),
]})  # fmt: skip
def test_a_run_at_its_end_is_left_alone_where_it_was_told_so_or_something_changed(is_over, was_told, changes, expected):
    trainer = SimpleNamespace(stop_trigger=lambda given: given is trainer and is_over)
    own = SimpleNamespace(
        comm=SimpleNamespace(bcast_obj=lambda x: x),
        folder=SimpleNamespace(summary={"status": was_told}),
        trainer=trainer,
    )
    assert runs.TrainingRun._is_over(own, changes) is expected


def test_what_is_said_of_a_run_that_is_left_alone():
    heard, changes = [], [runs.resume.Change("lr", 0.1, 0.2)]
    own = SimpleNamespace(say=heard.append, folder=SimpleNamespace(close=lambda: heard.append("closed")))
    own.trainer = SimpleNamespace(updater=SimpleNamespace(iteration=1))
    runs.TrainingRun._leave_alone(own, "snapshot_iter_1", changes)
    old, new = runs.resume.shown(changes[0].old), runs.resume.shown(changes[0].new)
    assert heard == [
        "snapshot_iter_1 is the end of this run, after 1 step: no steps are left, and nothing was changed",
        f"  not used: lr {new}, the run had {old}", "closed",
    ]  # fmt: skip


@each(**{"has_device, finder, log": [(False, None, [{"main/loss": 1.0, "lr": 2.0, "a/b": 3}]), (True, "f", [])]})
def test_what_a_run_came_to(monkeypatch, has_device, finder, log):
    monkeypatch.setattr(runs, "peak_bytes", lambda: 77)
    own = SimpleNamespace(
        trainer=SimpleNamespace(updater=SimpleNamespace(epoch_detail=1.5, iteration=9), elapsed_time=20.0),
        log=SimpleNamespace(log=log), config=SimpleNamespace(batch_finder=finder, batch_size=32, seed=4),
        parts=SimpleNamespace(task=SimpleNamespace(count_params=lambda: 123), device="gpu" if has_device else None),
    )  # fmt: skip
    assert runs.TrainingRun.results(own, 2.5) == {
        "epochs": 1.5, "iterations": 9, "seconds": 2.5, "seconds_over_all_starts": 2.5 if finder else 20.0,
        "metrics": {"main/loss": 1.0, "a/b": 3} if log else {}, "num_parameters": 123, "batch": 32, "seed": 4,
        **({"device_memory_bytes": 77} if has_device else {}),
    }  # fmt: skip


@each(**{"rank, lines": [(0, ["a", "b"]), (1, [])]})
def test_a_profiled_run_says_its_functions(monkeypatch, rank, lines):
    asked, heard = [], []

    @contextlib.contextmanager
    def profile(least):
        asked.append(least)
        yield SimpleNamespace(lines=lambda: ["a", "b"])

    monkeypatch.setattr(runs, "profile", profile)
    own = SimpleNamespace(parts=SimpleNamespace(device=None), comm=SimpleNamespace(rank=rank), say=heard.append)
    own.train = lambda traces: asked.append(traces) or 75
    assert runs.TrainingRun._train_profiled(own) == 75 and asked == [0.02, True] and heard == lines
    own._train_profiled = lambda: 7
    assert runs.TrainingRun.train(own, traces=False, profiles=True) == 7


@each(**{"size, has, is_told": [(1, True, False), (1, False, False), (2, True, True), (2, False, False)]})
def test_the_meter_asks_the_optimizer_of_several_ranks_how_long_it_waited(monkeypatch, size, has, is_told):
    told = []

    def meter(num_per_epoch, updater, optimizer, device):
        told.append((num_per_epoch, optimizer, device))
        raise ZeroDivisionError

    optimizer = SimpleNamespace(**({"exposed_seconds": 1.0} if has else {}))
    updater = SimpleNamespace(get_optimizer=lambda name: optimizer, connect_trainer=lambda trainer: None)
    monkeypatch.setattr(runs, "Meter", meter)
    monkeypatch.setattr(runs, "Trainer", lambda updater, end, out: None)
    monkeypatch.setattr(runs, "end_of", lambda config, test: END)
    own = SimpleNamespace(
        config=SimpleNamespace(out="x"), comm=SimpleNamespace(size=size), range_test=None, _updater=lambda: updater,
        iterator=SimpleNamespace(num_per_epoch=9), parts=SimpleNamespace(device="device"),
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        runs.TrainingRun._trainer(own)
    assert told == [(9, optimizer if is_told else None, "device")]


@each(on_gpu=[False, True])
def test_the_memory_of_a_gpu_is_asked_where_there_is_one(made, monkeypatch, on_gpu):
    asked, plain = [], runs.parts
    monkeypatch.setattr(runs, "parts", lambda *words: plain(*words)._replace(device="gpu" if on_gpu else None))
    monkeypatch.setattr(runs.preflight, "check", lambda *words: None)
    monkeypatch.setattr(runs.memory, "free_on_gpu", lambda: asked.append("free") or 77)

    def measure(config, origin, parts):
        asked.append(parts.device)
        raise ZeroDivisionError

    monkeypatch.setattr(runs.memory, "measure", measure)
    with pytest.raises(ZeroDivisionError):
        made()
    assert asked == (["free", "gpu"] if on_gpu else [None])
