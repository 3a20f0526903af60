"""What changes over a run: schedules of any number, groups of parameters, averages, the best snapshot, time."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
from dbrdist.cli.configuration import periods
from dbrdist.cli.configuration.load import check
from dbrdist.cli.running import evaluation, run
from dbrdist.cli.running import run as runs
from dbrdist.comm import create_communicator
from dbrdist.core.files.serializer import read_npz
from dbrdist.errors import ConfigError
from dbrdist.training import triggers
from dbrdist.training.extensions import snapshots
from dbrdist.training.triggers import TimeTrigger
from tests.cli.cli_helpers import MEASURED, lines

BASE = "model: mlp\ndata: digits\nbatch: 100\nepochs: 10\n"
OWN = """
import json
import os

import dbrdist
from dbrdist.training import StandardUpdater, make_extension


def half(epochs, first):
    return first * 0.5 ** epochs


def word(epochs):
    return "fast"


def huge(epochs, digits):
    return 10**digits


calls = []


def late(epochs, num_good):
    calls.append(epochs)
    if len(calls) > num_good:
        raise RuntimeError("no more")
    return 0.01


def later_out(epochs, num_good):
    try:
        return late(epochs, num_good)
    except RuntimeError:
        raise SystemExit(0)


seen = []


def watch():
    @make_extension(trigger=(1, "iteration"), priority=-50)
    def look(trainer):
        optimizer = trainer.updater.get_optimizer("main").actual_optimizer
        hook = next(iter(optimizer._hooks.pre.values()), None)
        smoothing = trainer.updater.get_optimizer("main").target.loss.keywords.get("label_smoothing")
        seen.append((optimizer.hyperparam.momentum, getattr(hook, "rate", None), smoothing, optimizer._loss_scale))

    return look


class Twice(StandardUpdater):
    def __init__(self, iterator, optimizer, converter, device, times=2):
        super().__init__(iterator, optimizer, converter, input_device=device)
        self.times = times

    def update_core(self):
        for _ in range(self.times):
            super().update_core()


def nothing(*args):
    return 5


def doubled(inside):
    def change(example, rng):
        x, t = example
        if not inside:
            return 2 * x, t
        x *= 2
        return x, t

    return change


found = []


def forks():
    @make_extension(trigger=(1, "iteration"))
    def fork(trainer):
        child = os.fork()
        if child == 0:
            raise SystemExit(3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open("result/summary.json") as file:
            found.append((code, json.load(file)["status"], os.path.exists("result/run.lock")))

    return fork
"""


def same_numbers(a, b):
    """The same weights, averages, optimizer state and losses."""
    first, second = (read_npz(snapshots.newest(folder)) for folder in (a, b))
    kept = [key for key in first if key.startswith(("updater/", "extensions/WeightAverage/"))]
    assert len(kept) > 10
    for key in kept:
        assert np.array_equal(first[key], second[key]), key
    logs = [[{k: v for k, v in e.items() if "val" not in k} for e in lines(f"{f}/log.jsonl")] for f in (a, b)]
    assert [{k: v for k, v in e.items() if k not in MEASURED} for e in logs[0]] == [
        {k: v for k, v in e.items() if k not in MEASURED} for e in logs[1]
    ]


@pytest.fixture
def own(folder):
    (folder / "over.py").write_text(OWN)
    yield
    sys.modules.pop("over", None)


# ---- schedules -------------------------------------------------------------------------------------------------------
SCHEDULED = [
    "schedules=[{of: optimizer.momentum, schedule: {name: polynomial, end: 0.5}},"
    " {of: optimizer.hooks.0.rate, schedule: {name: 'over:half', args: {first: 0.01}}},"
    " {of: loss.label_smoothing, schedule: {name: step, milestones: [0.1], gamma: 0.25}},"
    " {of: loss_scale, schedule: {name: exponential, gamma: 4}}]",
    "optimizer.hooks=[{name: weight_decay, rate: 0.5}]",
    "loss.label_smoothing=0.2",
    "loss_scale=8",
    "extensions=[over:watch]",
    "optimizer.momentum=0.9",
    "epochs=1",
    "iterations=3",
]


def test_schedules_of_any_number(run, own):
    code, _, err = run("run.yaml", *SCHEDULED)
    assert code == 0, err
    for i, (momentum, rate, smoothing, scale) in enumerate(sys.modules["over"].seen):
        epochs = i * 100 / 1442  # the first step has the values of epoch 0
        assert momentum == pytest.approx(0.5 + 0.4 * (1 - epochs))
        assert rate == pytest.approx(0.01 * 0.5**epochs)
        assert smoothing == pytest.approx(0.2 if epochs < 0.1 else 0.05)
        assert scale == pytest.approx(8 * 4**epochs)
    assert len(sys.modules["over"].seen) == 3


def test_schedules_go_on_exactly(run, own):
    words = ["run.yaml", *SCHEDULED, "snapshot.every=1 iteration", "log.every=1 iteration"]
    assert run(*words, "out=straight")[0] == 0
    assert run(*words, "out=cut", "iterations=2")[0] == 0
    assert run(*words, "out=cut", "--resume")[0] == 0
    same_numbers("straight", "cut")


def test_an_own_schedule_of_the_rate(run, own):
    words = "optimizer.schedule={name: 'over:half', args: {first: 0.3}, warmup_epochs: 0.1, warmup_start: 0.1}"
    assert run("run.yaml", words, "log.every=1 iteration", "iterations=4")[0] == 0
    peak = 0.3 * 0.5**0.1
    rates = [0.1 + (peak - 0.1) * e / 0.1 if e < 0.1 else 0.3 * 0.5**e for e in (i * 100 / 1442 for i in range(4))]
    assert [entry["lr"] for entry in lines("result/log.jsonl")] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{of: optimizer.momentun, schedule: cosine}", "schedules.0.of: expected the key of a number of the optimizer"),
        ("{of: optimizer.lr, schedule: cosine}", "optimizer.lr has its schedule under optimizer.schedule"),
        ("{of: batch, schedule: cosine}", "expected the key of a number of the optimizer"),
        ("{of: optimizer.hooks.3.rate, schedule: cosine}", "expected the key of a number of the optimizer"),
        ("{of: optimizer.hooks.².rate, schedule: cosine}", "expected the key of a number of the optimizer"),
        ("{of: loss_scale, schedule: cosine}", "loss_scale is auto; only a number can have a schedule"),
        ("{of: optimizer.momentum}", "schedules.0.schedule: is required and missing"),
        ("{of: optimizer.momentum, schedule: {name: step, milestones: [20]}}", "epoch 20 is never reached"),
        ("{of: optimizer.momentum, schedule: {name: cosine, warmup_epochs: 20}}", "longer than the run"),
    ],
)
def test_schedules_that_cannot_be(words, message):
    with pytest.raises(ConfigError) as caught:
        check((BASE + f"schedules: [{words}]\n").encode(), "run.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml:5:")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "{of: loss_scale, schedule: cosine}",
            "loss_scale becomes 0 during the run, but expected auto",
        ),
        ("{of: optimizer.momentum, schedule: {name: exponential, gamma: 2}}", "optimizer.momentum becomes 1.8 during"),
        ("{of: optimizer.momentum, schedule: {name: 'over:half', args: {first: -1}}}", "optimizer.momentum becomes -1"),
    ],
)
def test_schedules_that_leave_the_range(run, own, words, message):
    code, _, err = run("run.yaml", "optimizer.momentum=0.9", "loss_scale=8", f"schedules=[{words}]")
    assert code == 2
    assert f"schedules.0.schedule: {message}" in err


def test_two_schedules_of_one_number():
    with pytest.raises(ConfigError, match=r"schedules\.1\.of: optimizer\.momentum has a schedule already"):
        one = "{of: optimizer.momentum, schedule: cosine}"
        check((BASE + f"schedules: [{one}, {one}]\n").encode(), "run.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.schedule=over:word", "expected a finite number from over:word(0.0), got 'fast'"),
        ("optimizer.schedule={name: 'over:huge', args: {digits: 400}}", "got an integer too large for a float"),
        ("optimizer.schedule={name: 'over:huge', args: {digits: 5000}}", "got an integer too large for a float"),
        (
            "schedules=[{of: optimizer.momentum, schedule: {name: 'over:huge', args: {digits: 400}}}]",
            "got an integer too large for a float",
        ),
        ("optimizer.schedule=over:half", "calling 'over:half' failed: TypeError"),
        ("optimizer.schedule={name: 'over:half', args: {last: 1}}", "'over:half' takes no 'last'"),
        ("updater=over:nothing", "updater: expected a StandardUpdater from 'over:nothing', got int"),
        ("updater={name: 'over:Twice', args: {tims: 3}}", "takes no 'tims', did you mean 'times'?"),
        ("updater=5", "updater: expected a mapping, got 5"),
    ],
)
def test_mistakes_in_own_parts(run, own, words, message):
    code, _, err = run("run.yaml", words)
    assert code == 2
    assert message in err or (message.startswith("calling") and "the arguments do not fit" in err)
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "words"), [("late", "RuntimeError: no more"), ("later_out", "SystemExit: 0")])
def test_an_own_schedule_that_fails_during_the_run(run, own, name, words):
    """It was looked at 201 times before; the sentence says where the schedule stands and which line raised."""
    schedule = f"optimizer.schedule={{name: 'over:{name}', args: {{num_good: 204}}}}"
    code, _, err = run("run.yaml", schedule, "iterations=8", "snapshot.every=1 iteration")
    assert code == 2
    assert f"optimizer.schedule: over:{name}: calling it for epoch " in err and f"failed: {words} (" in err
    assert "over.py:" in err and "Traceback" not in err
    assert json.loads(Path("result/summary.json").read_text())["status"] == "failed"


def test_a_folder_that_takes_no_file_is_named(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "write_json", full)
    code, _, err = run("run.yaml", "model=mlp", "transforms.train=[]")
    assert (code, err) == (2, "dbrdist-train: result: No space left on device\n")


def test_an_own_transform_that_changes_examples_in_place_leaves_the_data_as_they_are(run, own):
    for inside in ("true", "false"):
        change = f"transforms.train=[{{name: 'over:doubled', args: {{inside: {inside}}}}}]"
        words = ("batch=500", "epochs=3", "iterations=null", "model=mlp", "log.every=1 iteration", f"out={inside}")
        assert run("run.yaml", change, *words)[0] == 0
    same_numbers("true", "false")


def test_a_child_that_own_code_forks_does_not_end_the_run(run, own):
    process = os.getpid()
    try:
        code, _, err = run("run.yaml", "extensions=[{name: 'over:forks'}]", "iterations=2")
    except SystemExit:  # in a child, which has come out here
        os._exit(7 if os.getpid() != process else 8)
    assert code == 0, err
    assert sys.modules["over"].found == [(7, "running", True)] * 2
    assert json.loads(Path("result/summary.json").read_text())["status"] == "finished"


def test_an_own_updater(run, own):
    code, _, err = run(
        "run.yaml", "updater={name: 'over:Twice', args: {times: 3}}", "iterations=2", "log.every=1 iteration"
    )
    assert code == 0, err
    assert [entry["iteration"] for entry in lines("result/log.jsonl")] == [1, 2]
    assert read_npz(snapshots.newest("result"))["updater/optimizer:main/t"] == 6


# ---- groups ----------------------------------------------------------------------------------------------------------
def test_decay_by_group(run, folder):
    """The decay adds -lr rate p to a step of SGD; the loss's own part is the same in both."""
    base = ["run.yaml", "model=mlp", "transforms.train=[]", "optimizer=sgd", "optimizer.lr=0.5", "iterations=1"]
    groups = "{name: weight_decay, rate: 0.25, skip: ['*/b']}, {name: weight_decay, rate: 0.125, only: ['/2/b']}"
    hooks = f"optimizer.hooks=[{groups}]"
    start = dbrdist.load  # the network before its first step: a rate so small that nothing moves
    assert run(*base, "optimizer.lr=1e-30", "out=start")[0] == 0
    assert run(*base, "out=plain")[0] == 0
    assert run(*base, hooks, "out=decayed")[0] == 0
    for (path, first), (_, plain), (_, decayed) in zip(
        *(start(out).namedparams() for out in ("start", "plain", "decayed")), strict=True
    ):
        rate = {"/2/b": 0.125}.get(path, 0.0 if path.endswith("/b") else 0.25)
        np.testing.assert_allclose(decayed.array, plain.array - 0.5 * rate * first.array, atol=1e-6)


def test_groups_are_listed(run):
    base = ["run.yaml", "model=mlp", "--dry-run"]
    assert "decay" not in run(*base)[1].partition("data: digits,")[2]
    hooks = (
        "optimizer.hooks=[{name: weight_decay, rate: 0.25, skip: ['*/b']}, {name: lasso, rate: 0.125, only: ['/2/b']}]"
    )
    _, out, _ = run(*base, hooks)
    assert "weight_decay 0.25: 3 parameters, 17,400 numbers: /0/W, /1/W, /2/W\n" in out
    assert "lasso 0.125: 1 parameter, 10 numbers: /2/b\n" in out
    assert "no decay: 2 parameters, 200 numbers: /0/b, /1/b\n" in out
    _, out, _ = run(*base, "optimizer=lars")
    assert "weight_decay 0.0001: 3 parameters, 17,400 numbers: /0/W, /1/W, /2/W\n" in out
    assert "no decay: 3 parameters, 210 numbers" in out


def test_a_group_without_a_parameter(run):
    code, _, err = run("run.yaml", "model=mlp", "optimizer.hooks=[{name: weight_decay, rate: 1, only: ['/fc/*']}]")
    assert code == 2
    assert "optimizer.hooks.0: no parameter fits; there are /0/W, /0/b" in err


# ---- the average of the weights --------------------------------------------------------------------------------------
def weights(path, prefix="updater/model:main/predictor/"):
    return {k.removeprefix(prefix): v for k, v in read_npz(path).items() if k.startswith(prefix)}


@pytest.mark.parametrize("ema", ["0.75", "{decay: 0.75, warmup: false}"])
def test_the_average_is_the_sum_of_all_weights(run, ema):
    words = ["run.yaml", f"ema={ema}", "iterations=4", "snapshot.every=1 iteration", "snapshot.keep=9"]
    assert run("run.yaml", "optimizer.lr=1e-30", "iterations=1", "out=start")[0] == 0
    code, _, err = run(*words)
    assert code == 0, err
    expected = {k: v.astype(np.float64) for k, v in weights("start/snapshot_iter_1").items() if v.ndim}
    for t in range(1, 5):
        d = min(0.75, (1 + t) / (10 + t)) if "false" not in ema else 0.75
        now = weights(f"result/snapshot_iter_{t}")
        expected = {k: d * v + (1 - d) * now[k] for k, v in expected.items()}
    average = weights("result/snapshot_iter_4", "extensions/WeightAverage/weights/predictor/")
    assert sorted(average) == ["bn/beta", "bn/gamma", "l1/W", "l1/b", "l2/W", "l2/b"]
    for key, value in average.items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=1e-6)


def test_the_average_is_evaluated_saved_and_gone_on_with(run, folder):
    words = [
        "run.yaml",
        "ema=0.5",
        "log.every=1 iteration",
        "evaluation.every=1 iteration",
        "snapshot.every=1 iteration",
    ]
    assert run(*words, "out=straight")[0] == 0
    assert run(*words, "out=cut", "iterations=2")[0] == 0
    assert run(*words, "out=cut", "--resume")[0] == 0
    same_numbers("straight", "cut")
    last = lines("straight/log.jsonl")[-1]
    code, out, err = run("run.yaml", "--evaluate", "straight")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["validation/main/loss"] == pytest.approx(
        last["validation/main/loss"], rel=1e-6
    )
    assert run("run.yaml", "out=plain", "log.every=1 iteration")[0] == 0
    plain = lines("plain/log.jsonl")[-1]
    assert plain["main/loss"] == last["main/loss"]  # the run itself is as without
    assert plain["validation/main/loss"] != last["validation/main/loss"]
    average = weights("straight/snapshot_iter_3", "extensions/WeightAverage/weights/predictor/")
    from usernet import Net

    loaded = dict(dbrdist.load("straight", model=Net(12)).namedparams())
    for key, value in average.items():
        np.testing.assert_array_equal(loaded["/" + key].array, value)


def test_an_average_that_comes_with_a_resume(run):
    assert run("run.yaml", "iterations=2")[0] == 0
    code, out, err = run("run.yaml", "ema=0.5", "log.tensorboard=true", "--resume")
    assert code == 0, err
    assert "ema is now {half_life: null, decay: 0.5," in out
    before, after = weights("result/snapshot_iter_2"), weights("result/snapshot_iter_3")
    average = weights("result/snapshot_iter_3", "extensions/WeightAverage/weights/predictor/")
    d = 2 / 11
    for key, value in average.items():
        np.testing.assert_allclose(value, d * before[key] + (1 - d) * after[key], rtol=1e-4, atol=1e-6)


# ---- the best, and saves by time -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "best"), [("auto", min), ("max", max)])
def test_the_best_is_saved(run, mode, best):
    words = ["run.yaml", "snapshot.best=validation/main/loss", f"snapshot.mode={mode}", "optimizer.lr=0.9"]
    words += ["iterations=8", "evaluation.every=1 iteration", "log.every=1 iteration", "optimizer.schedule=constant"]
    code, _, err = run(*words, "out=straight")
    assert code == 0, err
    log = [entry["validation/main/loss"] for entry in lines("straight/log.jsonl")]
    step = int(read_npz("straight/snapshot_best")["updater/iteration"])
    assert log[step - 1] == best(log)
    code, out, _ = run("run.yaml", "--evaluate", "straight/snapshot_best")
    assert json.loads(out.splitlines()[-1])["validation/main/loss"] == pytest.approx(best(log), rel=1e-6)
    assert run(*words, "out=cut", "iterations=3")[0] == 0
    assert run(*words, "out=cut", "--resume")[0] == 0
    assert int(read_npz("cut/snapshot_best")["updater/iteration"]) == step


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["snapshot.best=validation/main/acc"],
            "no evaluation reports 'validation/main/acc'; it reports validation/main/acc",
        ),
        (
            ["snapshot.best=validation/main/loss", "data={name: 'usernet:few', args: {n: 200}}", "transforms.train=[]"],
            "there is no test data",
        ),
        (
            ["stop={metric: validation/main/acuracy, target: 0.9}"],
            "stop.metric: no evaluation reports 'validation/main/acuracy'; it reports validation/main/acc",
        ),
        (
            ["snapshot.every=1 or 2"],
            "snapshot.every: expected a period such as '1 epoch', '200 iterations', '30 minutes'",
        ),
        (["snapshot.every=0 minutes"], "snapshot.every: expected a period such as"),
        (["log.every=3 minutes"], "log.every: expected a period such as '1 epoch', '0.5 epochs'"),
        (["snapshot.mode=most"], "snapshot.mode: expected 'auto', 'min' or 'max', got 'most'"),
    ],
)
def test_snapshots_that_cannot_be(run, words, message):
    code, _, err = run("run.yaml", *words)
    assert code == 2
    assert message in err


@pytest.mark.filterwarnings("default:stopping at a goal")
def test_a_run_with_a_goal_and_without_test_data_goes_on_to_its_last_epoch_and_says_so(run):
    """As a recipe whose test data is left out."""
    words = ["stop={target: 0.9}", "data={name: 'usernet:few', args: {n: 200}}", "transforms.train=[]", "epochs=2"]
    code, out, err = run("run.yaml", *words, "iterations=null")
    assert code == 0
    assert "the run goes on to its last epoch: nobody has reported 'validation/main/accuracy'" in out + err


def test_a_best_that_never_came_is_said(run):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, out, err = run("run.yaml", "snapshot.best=main/something")
    assert "warning: MinValueTrigger: nobody has reported 'main/something'" in " ".join(err.split())
    assert "no snapshot_best was saved, because nothing was observed as 'main/something'" in " ".join(out.split())
    _, out, _ = run("run.yaml", "snapshot.best=main/loss", "--overwrite")
    assert "snapshot_best was" not in out
    assert Path("result/snapshot_best").exists()


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("30 minutes", "30 minute"),
        ("1 epoch or 2 hours", "1 epoch or 2 hour"),
        ("0.5 epochs or 90 seconds or 7 iterations", "0.5 epoch or 90 second or 7 iteration"),
    ],
)
def test_periods(text, every):
    made, _ = check((BASE + f"snapshot: {{every: {text}}}\n").encode(), "run.yaml")
    assert made.snapshot.every == every
    assert check((BASE + f"snapshot: {{every: {every}}}\n").encode(), "run.yaml")[0] == made


def test_triggers_of_time():
    class Agreement:
        def elapsed_time(self, trainer):
            return trainer

    trigger = run.trigger_of("2 minute", Agreement())
    assert isinstance(trigger, triggers.TimeTrigger)
    assert [t for t in (0, 119, 120, 121, 239, 250, 361) if trigger(t)] == [120, 250, 361]
    assert [run.uses_time(p) for p in ("1 epoch", "1 epoch or 2 hour", "3 second", "7 iteration")] == [
        False,
        True,
        True,
        False,
    ]
    assert set(periods.SECONDS) == {"second", "minute", "hour"}


def test_a_run_saves_by_time(run):
    code, _, err = run("run.yaml", "snapshot.every=0.000001 seconds", "snapshot.keep=9", "iterations=3")
    assert code == 0, err
    assert sorted(p.name for p in Path("result").glob("snapshot*")) == [f"snapshot_iter_{i}" for i in (1, 2, 3)]
    # the first step after the resume is late by the period that was; then nine hours pass, or the run ends
    code, _, err = run("run.yaml", "snapshot.every=9 hours", "snapshot.keep=9", "iterations=7", "--resume")
    assert code == 0, err
    assert sorted(p.name for p in Path("result").glob("snapshot*")) == [f"snapshot_iter_{i}" for i in (1, 2, 3, 4, 7)]


def test_event_files(run):
    assert run("run.yaml", "log.tensorboard=true", "log.every=1 iteration")[0] == 0
    assert run("run.yaml", "log.tensorboard=true", "log.every=1 iteration", "--resume", "iterations=4")[0] == 0
    assert len(list(Path("result/tensorboard").iterdir())) == 2
    assert run("run.yaml", "--overwrite")[0] == 0
    assert not Path("result/tensorboard").exists()
    assert len(list(Path("result.old-1/tensorboard").iterdir())) == 2


def test_snapshots_by_time_come_after_seconds_minutes_and_hours():
    agreement = SimpleNamespace(elapsed_time=lambda trainer: 0.0)
    for text, seconds in (("2.5 second", 2.5), ("3 minute", 180.0), ("0.5 hour", 1800.0)):
        made = runs.trigger_of(text, agreement)
        assert isinstance(made, TimeTrigger) and made.period == seconds
        assert runs.uses_time(f"1 epoch or {text}")
    assert not runs.uses_time("1 epoch or 20 iteration")


def test_an_evaluation_ends_what_it_began(monkeypatch, capsys):
    happened = []

    class Evaluation:
        def __call__(self, trainer):
            happened.append((self.name, trainer))
            return {"validation/main/loss": np.float32(0.5)}

        def finalize(self):
            happened.append("finalized")

    made = SimpleNamespace(data=SimpleNamespace(test=[1], classes=None), task="task", recipe={})
    monkeypatch.setattr(evaluation.preflight, "check_test", lambda *arguments: None)
    monkeypatch.setattr(evaluation.build, "find_images", lambda *arguments: None)
    monkeypatch.setattr(evaluation, "parts", lambda *arguments: made)
    monkeypatch.setattr(evaluation, "find_snapshot", lambda folder: f"{folder}/snapshot")
    monkeypatch.setattr(evaluation, "load_weights", lambda *arguments: happened.append(arguments) or {})
    monkeypatch.setattr(evaluation, "evaluator", lambda *arguments: Evaluation())
    config = SimpleNamespace(model_copy=lambda update: None)
    evaluation.evaluate(config, None, create_communicator("naive"), "run")
    assert happened == [("run/snapshot", "task"), ("validation", None), "finalized"]
    assert capsys.readouterr().out == '{"snapshot": "run/snapshot", "validation/main/loss": 0.5}\n'


def test_a_report_that_cannot_be_written_ends_no_run(run, monkeypatch):
    def fail(folders):
        raise ValueError("no fonts")

    monkeypatch.setattr(runs.report, "write", fail)
    code, out, err = run("run.yaml", "model=mlp", "transforms.train=[]", "iterations=1")
    assert code == 0, err
    assert "result: the report could not be written: no fonts\n" in out
    assert json.loads(Path("result/summary.json").read_text())["status"] == "finished"
