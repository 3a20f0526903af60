"""`dbrdist-train` with one rank, in this process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest

import dbrdist
from dbrdist.cli import train
from dbrdist.cli.configuration.load import check, load
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.output.refuse import Refused, RefusedHere
from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.communicators.create import name_of
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.comm.transport import mpi
from dbrdist.core.array import spans
from dbrdist.errors import CommunicatorError, ConfigError
from dbrdist.training import runs
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import OWN_MODULE, OWN_PARTS, ROOT, lines, same_runs
from tests.each import each


def test_a_run_leaves_its_folder(run):
    code, out, _ = run("run.yaml", "out=here", "log.every=1 iteration")
    assert code == 0
    assert sorted(os.listdir("here")) == [
        "config.yaml",
        "log.jsonl",
        "log.txt",
        "model.json",
        "ranks",
        "report",
        "snapshot_iter_3",
        "summary.json",
        "test_examples.json",
    ]
    assert load("here/config.yaml")[0] == load("run.yaml", ["out=here", "log.every=1 iteration"])[0]
    log = lines("here/log.jsonl")
    assert [entry["iteration"] for entry in log] == [1, 2, 3]
    assert all(np.isfinite(entry["main/loss"]) for entry in log)
    summary = json.loads(Path("here/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["iterations"] == 3
    assert summary["metrics"]["validation/main/accuracy"] == log[-1]["validation/main/accuracy"]
    assert summary["num_skipped_examples"] == 0
    last = out.splitlines()[-1]
    assert last == f"test accuracy {100 * log[-1]['validation/main/accuracy']:.2f} %"


def test_the_learning_rate_follows_the_schedule(run):
    run("run.yaml", "log.every=1 iteration", "iterations=8")
    rates = [entry["lr"] for entry in lines("result/log.jsonl")]
    done = np.arange(8) * 100 / 1442
    cosine = 0.05 * (1 + np.cos(np.pi * done)) / 2
    peak = 0.05 * (1 + np.cos(np.pi * 0.3)) / 2
    np.testing.assert_allclose(rates, np.where(done < 0.3, peak * done / 0.3, cosine), rtol=1e-12)


def test_one_is_singular(run):
    assert "finished: 1 epoch, 15 steps in" in run("run.yaml", "iterations=null", "epochs=1")[1]
    assert "finished: 0.06935 epochs, 1 step in" in run("run.yaml", "iterations=1", "--overwrite")[1]


def test_the_trained_network_comes_back(run):
    code, out, _ = run("run.yaml", "iterations=10")
    assert code == 0
    net = runs.load("result", model=sys.modules["usernet"].Net)
    _, test = dbrdist.datasets.get_digits(ndim=3)
    x, t = (np.array(column) for column in zip(*test[:]))
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        scores = net(x).array
    accuracy = float((scores.argmax(1) == t).mean())
    assert f"test accuracy {100 * accuracy:.2f} %" in out
    with pytest.raises(dbrdist.errors.CheckpointError, match="expected the folder of a run"):
        runs.load("nowhere")
    Path("result/model.json").unlink()  # as in the folder of a script's own trainer
    with pytest.raises(dbrdist.errors.CheckpointError, match=r"for the snapshot of a script: load_npz\('result/snapsh"):
        runs.load("result")


def test_a_device_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, _, err = run("run.yaml", "device=gpu")
    assert code == 2
    assert "device: gpu cannot be used: expected CuPy for a GPU device" in err


def test_evaluate_gives_the_same_numbers_again(run):
    run("run.yaml")
    metrics = json.loads(Path("result/summary.json").read_text())["metrics"]
    code, out, _ = run("run.yaml", "--evaluate", "result", "evaluation.batch=7")
    assert code == 0
    again = json.loads(out)
    assert again["snapshot"] == "result/snapshot_iter_3"
    assert again["validation/main/accuracy"] == pytest.approx(metrics["validation/main/accuracy"], rel=1e-6)
    assert again["validation/main/loss"] == pytest.approx(metrics["validation/main/loss"], rel=1e-5)


def test_dry_run_prints_the_plan_and_writes_nothing(run):
    before = sorted(os.listdir())
    code, out, _ = run("run.yaml", "--dry-run", "epochs=4", "iterations=null", "model=mlp", "transforms.train=[]")
    assert code == 0
    assert sorted(os.listdir()) in (before, sorted([*before, "__pycache__"]))
    params = 64 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    assert f"model: mlp, {params:,} parameters of float32" in out
    assert "1,442 training examples, 355 test examples" in out
    assert "steps: 15 per epoch, about 60 in all\n" in out and f"{params:,} parameters" in out
    assert "lr: 0.05" in out


def test_print_schema(run):
    code, out, _ = run("--print-schema")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(Config.model_json_schema()))


def test_an_interrupt_stays_one(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dbrdist.cli.configuration.load.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("run.yaml")


@pytest.mark.parametrize(
    "error", [EOFError("Ran out of input"), BrokenPipeError(errno.EPIPE, "Broken pipe"), click.exceptions.Exit(0)]
)
def test_what_click_takes_for_its_own_stays_an_error(run, monkeypatch, error):
    """A cut-off file of data is no Ctrl-C, a lost connection has a reason, and no failed run ends with code 0."""
    reason = KeyError("why")

    def fails(*_):
        raise error from reason

    monkeypatch.setattr(train, "_run", fails)
    with pytest.raises(type(error)) as raised:
        run("run.yaml")
    assert raised.value is error and error.__cause__ is reason


@pytest.mark.parametrize("stop", [1, 4])
def test_resume_goes_on_as_if_nothing_had_happened(run, stop):
    words = ["run.yaml", "log.every=1 iteration", "epochs=0.6", "iterations=null"]
    assert run(*words, "out=straight")[0] == 0
    assert run(*words, "out=cut", f"iterations={stop}")[0] == 0
    code, out, _ = run(*words, "out=cut", "--resume")
    assert code == 0
    assert f"continuing from cut/snapshot_iter_{stop}" in out
    same_runs("straight", "cut", extra_evaluation_at=stop)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_in_16_bits_updates_in_float32_and_resumes_exactly(run, dtype):
    words = ("run.yaml", f"dtype={dtype}", "snapshot.every=2 iterations", "log.every=1 iteration")
    assert run(*words, "out=whole", "iterations=6")[0] == 0
    assert run(*words, "out=cut", "iterations=4")[0] == 0
    assert run(*words, "out=cut", "iterations=6", "--resume")[0] == 0
    same_runs("whole", "cut", extra_evaluation_at=4)
    saved = np.load(snapshots.newest("whole"))
    wide = [key for key in saved if key.endswith("fp32_param")]
    assert wide and all(saved[key].dtype == np.float32 for key in wide)
    scales = [float(saved[key]) for key in saved if key.endswith("loss_scale")]
    assert scales == ([2.0**6] if dtype == "float16" else [])


def test_a_loss_scale_reaches_the_gradients(run):
    for dtype in ("float64", "float16"):
        for scale in (1, 1024):
            words = (f"dtype={dtype}", f"loss_scale={scale}", "log.every=1 iteration", "iterations=6")
            assert run("run.yaml", *words, f"out={dtype}-{scale}")[0] == 0
    same_runs("float64-1", "float64-1024")  # powers of two change no bit where nothing underflows
    one, other = (np.load(snapshots.newest(f"float16-{scale}")) for scale in (1, 1024))
    wide = [key for key in one if key.endswith("fp32_param")]
    assert any((one[key] != other[key]).any() for key in wide)  # there small gradients lose bits


def test_resume_without_a_snapshot_starts_from_the_beginning(run):
    code, out, _ = run("run.yaml", "--resume")
    assert code == 0
    assert "no snapshot in result: starting from the beginning" in out
    assert "no snapshot in result: starting from the beginning" in Path("result/log.txt").read_text()


def test_resume_with_damaged_snapshots_alone_is_refused(run):
    assert run("run.yaml", "iterations=4", "snapshot.every=1 iteration", "snapshot.keep=3")[0] == 0
    two, three, four = (Path(f"result/snapshot_iter_{k}") for k in (2, 3, 4))
    two.write_bytes(b"")
    three.write_bytes(three.read_bytes()[:-100])
    content = bytearray(four.read_bytes())
    content[len(content) // 2] ^= 1
    four.write_bytes(content)
    before = {path: path.read_bytes() for path in Path("result").iterdir() if path.is_file()}
    code, _, err = run("run.yaml", "iterations=4", "--resume")
    assert code == 2 and err == (
        "out: result holds a run, but none of its snapshots is intact (snapshot_iter_4: its bytes are not those that "
        "were saved; snapshot_iter_3: it ends early, or was never a snapshot; snapshot_iter_2: it is empty); put a "
        "copy of one there, or start a new run with --overwrite, which moves this one aside\n"
    )
    assert before == {path: path.read_bytes() for path in Path("result").iterdir() if path.is_file()}
    code, out, _ = run("run.yaml", "iterations=4", "--overwrite")
    assert code == 0 and "is now in result.old-1" in out
    assert Path("result.old-1/snapshot_iter_4").read_bytes() == content


def test_the_same_run_twice_is_the_same(run):
    run("run.yaml", "out=a")
    run("run.yaml", "out=b")
    same_runs("a", "b")
    run("run.yaml", "out=c", "seed=1")
    assert lines("a/log.jsonl")[0]["main/loss"] != lines("c/log.jsonl")[0]["main/loss"]


@pytest.mark.programs
@pytest.mark.parametrize("workers", [1, 2])  # a run has none by itself
def test_workers_change_nothing(run, workers):
    run("run.yaml", "out=a")
    run("run.yaml", "out=b", f"workers={workers}")
    same_runs("a", "b")


def test_dtype_reaches_everything(run):
    code, out, _ = run("run.yaml", "dtype=float64")
    assert code == 0
    assert "parameters of float64" in out
    assert runs.load("result", model=sys.modules["usernet"].Net).l1.W.dtype == np.float64


@pytest.mark.parametrize(("dtype", "narrow"), [("mixed16", "float16"), ("mixedbf16", "bfloat16")])
def test_mixed_types_keep_parameters_in_float32_and_resume_exactly(run, dtype, narrow):
    words = ("run.yaml", f"dtype={dtype}", "snapshot.every=2 iterations", "log.every=1 iteration")
    code, out, _ = run(*words, "iterations=4", "out=whole")
    assert code == 0
    assert f"parameters of float32, activations of {narrow}" in out
    assert run(*words, "iterations=2", "out=parts")[0] == run(*words, "iterations=4", "out=parts", "--resume")[0] == 0
    net = sys.modules["usernet"].Net
    whole, parts = (runs.load(folder, model=net) for folder in ("whole", "parts"))
    for (_, a), (_, b) in zip(whole.namedparams(), parts.namedparams()):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a.array, b.array)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing.yaml"], 2, "nothing.yaml: the configuration cannot be read: No such file or directory"),
        ([], 2, "expected a configuration"),
        (["epochs=3"], 2, "expected a configuration"),
        (["run.yaml", "--nonsense"], 2, "No such option"),
        (["run.yaml", "bach=3"], 2, "command line 'bach=3': bach: unknown key, did you mean 'batch'?"),
        (["run.yaml", "model=nomod:f"], 2, "importing 'nomod' failed: ModuleNotFoundError"),
        (["run.yaml", "model.args.width=wide"], 2, "run.yaml:1:15: model: calling 'usernet:Net' failed: "),
        (
            ["run.yaml", "model=usernet:noise", "model.args={scale: 1}"],
            2,
            "expected a Link from 'usernet:noise', got func",
        ),
        (["run.yaml", "data={name: image_folder, root: nowhere}"], 2, "nowhere/train is not a folder"),
        (["run.yaml", "data={name: npz, train: nowhere.npz}"], 2, "nowhere.npz"),
        (["run.yaml", "data=usernet:Net"], 2, "expected (train, test) of datasets from 'usernet:Net' (test None for"),
        (["run.yaml", "model=mlp", "data=usernet:few", "data.args.n=4", "transforms.train=[]"], 2, "model.num_classes"),
        (["run.yaml", "model=usernet:WrongShape"], 2, "99"),
        (["run.yaml", "optimizer.lr=1e30", "iterations=9"], 1, "NonFiniteLossError: iteration"),
        (["--evaluate", "nowhere"], 2, "nowhere/config.yaml: the configuration cannot be read"),
        (["--evaluate", "x", "--resume"], 2, "--evaluate does not train: it cannot be combined with --resume"),
        (["--evaluate", "x", "--profile"], 2, "it cannot be combined with --profile"),
        (["--evaluate", "x", "--dry-run"], 2, "it cannot be combined with --dry-run"),
        (["--watch", "x", "--resume"], 2, "--watch cannot be combined with --resume"),
        (["--report", "x", "--dry-run"], 2, "--report cannot be combined with --dry-run"),
    ],
)
def test_bad_input(run, words, code, message):
    got, _, err = run(*words)
    assert got == code
    assert message in err
    assert "Traceback" not in err


def test_a_runs_folder_in_the_place_of_its_configuration(run):
    os.mkdir("r")
    Path("r", "config.yaml").write_bytes(Path("run.yaml").read_bytes())
    code, _, err = run("r", "--resume")
    assert code == 2 and "r: the configuration cannot be read: Is a directory; it is the folder of a run, " in err
    assert "whose own is r/config.yaml" in err


def test_a_mistake_in_the_users_network_shows_its_traceback(run):
    with pytest.raises(RuntimeError, match="my own mistake"):
        run("run.yaml", "model=usernet:Broken")


def test_resume_of_another_architecture_is_refused(run):
    run("run.yaml")
    for width in (11, 13):
        code, _, err = run("run.yaml", "--resume", f"model.args.width={width}")
        assert code == 2
        assert f"snapshot_iter_3: updater/model:main/predictor/l1/W: expected shape ({width}, 64)" in err
        assert f"since it was saved, model.args.width is now {width}, was 12" in err
    assert dbrdist.load("result", model=sys.modules["usernet"].Net).l1.W.shape == (
        12,
        64,
    )  # the folder still describes the run that is in it
    run("run.yaml", "model=mlp", "model.units=[5, 5]", "--overwrite")
    code, _, err = run("run.yaml", "--resume", "model=mlp", "model.units=[5]")
    assert code == 2
    assert "dbrdist-train: result/snapshot_iter_3: " in err


def test_a_full_disk_while_saving(run, monkeypatch):
    run("run.yaml", "iterations=1")
    before = sorted(os.listdir("result"))

    def full(file, obj, compression=True):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "save_npz", full)
    code, _, err = run("run.yaml", "--resume")
    assert code == 2
    assert "snapshot_iter_3: the snapshot could not be written: No space left on device" in err
    assert sorted(os.listdir("result")) == before
    assert snapshots.is_whole("result/snapshot_iter_1")


def test_a_profile_says_what_functions_and_layers_took(run):
    code, out, _ = run("run.yaml", "iterations=2", "--profile")
    assert code == 0 and "trace: 1 steps of" in out and "profile: " in out
    assert re.search(r"^LinearFunction +\d+ ", out, re.M) and "Python and everything else: " in out
    names = [e["name"] for e in json.loads(Path("result/trace.json").read_text())["traceEvents"]]
    assert any(name.startswith("LinearFunction (/") for name in names) and "backward" in names


def test_a_trace_that_cannot_be_written_is_no_failure_of_the_run(run, monkeypatch):
    code, out, _ = run("run.yaml", "iterations=2", "--trace")
    assert code == 0 and "trace: 1 steps of" in out
    names = [e["name"] for e in json.loads(Path("result/trace.json").read_text())["traceEvents"]]
    assert names.count("step") == names.count("forward") == 2
    os.remove("result/trace.json")
    os.mkdir("result/trace.json")  # in its place
    code, out, err = run("run.yaml", "iterations=3", "--resume", "--trace")
    assert code == 0, err
    assert "result: the trace could not be written: Is a directory" in out + err
    assert json.loads(Path("result/summary.json").read_text())["status"] == "finished"
    with pytest.raises(RuntimeError, match="my own mistake"):
        run("run.yaml", "model=usernet:Broken", "--overwrite", "--trace")
    assert spans.recording() is None


def test_a_request_to_stop_saves_and_exits_with_75(run, monkeypatch):
    real, armed = StepAgreement.__call__, [True]

    def stop_at_two(self, trainer):
        if armed and trainer.updater.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, trainer)

    monkeypatch.setattr(StepAgreement, "__call__", stop_at_two)
    words = ["run.yaml", "iterations=6", "log.every=1 iteration"]
    code, out, _ = run(*words, "out=cut")
    assert code == 75
    assert "all ranks stopped after step 2 and saved" in out
    assert json.loads(Path("cut/summary.json").read_text())["status"] == "stopped"
    armed.clear()
    assert run(*words, "out=cut", "--resume")[0] == 0
    assert run(*words, "out=straight")[0] == 0
    same_runs("straight", "cut")


def images(root, parts, classes, size=8):
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in parts:
        for label, name in enumerate(classes):
            folder = Path(root, part, name)
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = np.clip(rng.normal(60 * label + 60, 20, (size, size, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")


FOLDER = "data={name: image_folder, root: photos}"
PLAIN = ["transforms={train: [random_flip, {name: normalize, mean: [0.5], std: [0.2]}]}", "batch=4", "epochs=2"]


def test_image_folders(run):
    images("photos", ["train", "test"], ["cat", "dog", "owl"])
    code, out, _ = run("run.yaml", FOLDER, *PLAIN, "iterations=null", "model=mlp")
    assert code == 0
    assert "18 training examples, 18 test examples" in out


def test_class_folders_that_differ(run):
    images("photos", ["train"], ["cat", "dog"])
    images("photos", ["test"], ["cat", "fox"])
    code, _, err = run("run.yaml", FOLDER, *PLAIN)
    assert code == 2
    assert "command line" in err
    assert "only in the first: dog; only in the second: fox" in err


def test_a_corrupt_image_is_fatal_or_counted(run):
    images("photos", ["train", "test"], ["cat", "dog"])
    bad = Path("photos/train/dog/3.png")
    bad.write_bytes(bad.read_bytes()[:60])
    code, _, err = run("run.yaml", FOLDER, *PLAIN, "model=mlp", "iterations=null")
    assert code == 2
    assert "dbrdist-train: CorruptExampleError: corrupt image file photos/train/dog/3.png" in err
    code, out, _ = run("run.yaml", FOLDER, *PLAIN, "data.corrupt=skip", "model=mlp", "iterations=null", "out=skips")
    assert code == 0
    assert "1 corrupt training example left out" in out
    summary = json.loads(Path("skips/summary.json").read_text())
    assert summary["num_skipped_examples"] == 1
    assert "photos/train/dog/3.png" in summary["skipped_examples"][0]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_each_example_is_a_configuration(path):
    assert isinstance(load(path)[0], Config)


# ---- an optimizer of the user's own ---------------------------------------------------------------------------------
OWN = """
from dbrdist import optimizers

def momentum(lr):
    return optimizers.MomentumSGD(lr, momentum=0.9)

def falling():
    made = optimizers.SGD(0.5)
    update = made.update
    def fall(*args, **kwargs):
        update(*args, **kwargs)
        made.lr /= 2
    made.update = fall
    return made

class Bare:
    def setup(self, link):
        return self
"""


@pytest.fixture
def own(folder):
    (folder / "own.py").write_text(OWN)
    yield
    sys.modules.pop("own", None)


def test_an_own_optimizer_takes_hooks_and_a_schedule(run, own):
    settings = "schedule: {name: cosine, warmup_epochs: 0.3}, hooks: [{name: weight_decay, rate: 0.01}]"
    words = ("log.every=1 iteration", "iterations=8")
    built_in = f"optimizer={{name: momentum_sgd, lr: 0.05, {settings}}}"
    assert run("run.yaml", *words, "out=built-in", built_in)[0] == 0
    assert (
        run("run.yaml", *words, "out=own", f"optimizer={{name: 'own:momentum', args: {{lr: 0.05}}, {settings}}}")[0]
        == 0
    )
    same_runs("built-in", "own")


def test_an_own_optimizer_is_left_its_rate(run, own):
    assert run("run.yaml", "optimizer=own:falling", "log.every=1 iteration", "iterations=4")[0] == 0
    assert [entry["lr"] for entry in lines("result/log.jsonl")] == [0.25, 0.125, 0.0625, 0.03125]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("{name: 'own:Bare', schedule: cosine}", "optimizer.schedule: Bare has no lr to set"),
        ("{name: 'own:momentum', args: {lr: 1}, schedule: own:f}", "own.py has no 'f'"),
        ("{name: 'own:momentum', args: {lr: 1}, hooks: [own:decay]}", "own.py has no 'decay'"),
        (
            "{name: sgd, schedule: own}",
            "expected the name of a schedule: constant, step, exponential, polynomial, cosine, piecewise_linear, or",
        ),
    ],
)
def test_mistakes_beside_an_own_optimizer(run, own, optimizer, words):
    code, _, err = run("run.yaml", f"optimizer={optimizer}")
    assert code == 2
    assert words in err


ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.fixture
def begin(monkeypatch):
    """`_run` with a run that does nothing; what happened, in order."""
    happened = []
    one = SimpleNamespace(happened=happened, rank=0, starts=True, error=None, refused=None)

    class Run:
        def __init__(self, settings, origin, comm, console, warned, continues):
            if one.error is not None:
                raise one.error
            self.stop = SimpleNamespace(finalize=lambda: happened.append("signals given back"))

        def announce(self):
            happened.append("announced")

        def start_folder(self, mode):
            happened.append(mode)
            return one.starts

        def train(self, traces, profile=None):
            happened.append(("trained", traces))
            return 75

    def make(name, mpi_comm, settings, may_use_gpus):
        assert (mpi_comm, settings, may_use_gpus) == (None, {}, False)
        happened.append(name)
        if one.refused is not None:
            raise one.refused
        return SimpleNamespace(rank=one.rank)

    warned = SimpleNamespace(listening=contextlib.nullcontext, gather=lambda comm: happened.append("gathered"))
    monkeypatch.setattr(train, "create", make)
    monkeypatch.setattr(train, "Warned", lambda rank, console: warned)
    monkeypatch.setattr(train.thread_pools, "use_one", lambda: happened.append("one thread"))
    monkeypatch.setattr(train.resume, "compare_ranks", lambda *arguments: happened.append("compared"))
    monkeypatch.setattr(train.run, "TrainingRun", Run)
    monkeypatch.setattr(
        train.evaluation, "evaluate", lambda settings, origin, comm, run: happened.append(("evaluated", run))
    )
    monkeypatch.setattr(train.abort, "report", lambda words: happened.append(("here", words)))
    monkeypatch.setattr(train, "_complain", lambda words: happened.append(("said", words)))

    def call(mode="new", evaluate=None, trace=False, reproducible=False):
        happened.clear()
        settings = SimpleNamespace(communicator="flat", reproducible=reproducible, device="cpu")
        return train._run(settings, ORIGIN, mode, evaluate, trace), happened

    one.call = call
    return one


def test_a_run_is_announced_and_trained_where_steps_are_left(begin):
    assert begin.call() == (75, ["flat", "compared", "announced", "new", ("trained", False), "signals given back"])
    assert begin.call("resume", trace=True)[1][-3:-1] == ["resume", ("trained", True)]
    assert begin.call(reproducible=True)[1][:3] == ["flat", "one thread", "compared"]
    begin.starts = False
    assert begin.call() == (0, ["flat", "compared", "announced", "new", "signals given back"])
    assert begin.call(evaluate="old") == (0, ["flat", "compared", ("evaluated", "old"), "gathered"])


def test_a_refusal_is_said_by_rank_0_or_by_whom_it_concerns(begin):
    for begin.error, code, said in (
        (Refused("run.yaml:1:1: wrong", 2), 2, [("said", "run.yaml:1:1: wrong")]),
        (Refused("diverged", 1), 1, [("said", "dbrdist-train: diverged")]), (Refused("", 1), 1, []),
        (RefusedHere("disk full", 2), 2, [("here", "dbrdist-train: disk full")]),
    ):  # fmt: skip
        begin.rank = 0
        assert begin.call() == (code, ["flat", "compared", *said])
        begin.rank = 1
        assert begin.call() == (code, ["flat", "compared", *(words for words in said if words[0] == "here")])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_communicator_that_does_not_fit_is_a_mistake_of_the_configuration(begin, kind):
    begin.refused = kind("two GPUs for three ranks")
    with pytest.raises(ConfigError, match=r"^run.yaml:communicator: communicator: two GPUs for three ranks$"):
        begin.call()
    begin.refused = CommunicatorError("rank 3 is gone")
    with pytest.raises(CommunicatorError, match=r"^rank 3 is gone$"):
        begin.call()


@pytest.fixture
def own_module(folder):
    (folder / "ends_own.py").write_text(OWN_MODULE)
    return folder


def test_the_communicator_has_the_name_that_makes_it(run, monkeypatch):
    monkeypatch.setattr(mpi, "started", lambda: None)  # as if no other test of this process had started MPI
    run("run.yaml")
    assert json.loads(Path("result/summary.json").read_text())["communicator"] == "single"
    assert ">single<" in Path("result/report/index.html").read_text()
    assert name_of(create_communicator("single")) == "single"
    assert run_threads(2, lambda comm: name_of(create_communicator("threads"))) == ["threads", "threads"]


def test_what_cannot_be_written_has_the_name_that_was_given(run):
    run("run.yaml", "model=mlp")
    code, _, err = run("--export", "result", "nowhere/x.safetensors")
    assert (code, err) == (2, "dbrdist-train: nowhere/x.safetensors: No such file or directory\n")


def test_runs_that_are_not_there(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    os.remove("result/snapshot_iter_3")
    for words in (
        ["--report", "nowhere"],
        ["--report", "result", "nowhere"],
        ["--export", "nowhere", "x.safetensors"],
        ["--export", "result", "x.safetensors"],
        ["--predict", "result", "."],
        ["--evaluate", "nowhere"],
        ["--evaluate", "result"],
        ["--audit", "nowhere"],
    ):
        code, _, err = run(*words)
        assert code == 2 and "Traceback" not in err, (words, err)


@pytest.mark.parametrize("at", [7, 150, 201])
def test_a_stop_while_examples_are_read_loses_none(run, own_module, at):
    """The signal comes while a batch is being read; the examples of that batch are used once, before or after."""
    start = ["run.yaml", "audit=true", "iterations=null", "epochs=2", "workers=0", "transforms.train="]
    start[-1] += f"[{{name: 'ends_own:asked_to_stop', args: {{at: {at}}}}}]"
    assert run(*start)[0] == 75
    assert run(*start[:-1], "transforms.train=[]", "--resume")[0] == 0
    code, out, err = run("--audit", "result")
    assert code == 0, err
    assert out.count("1,442 of 1,442 examples, each once") == 2


BASE = "model: mlp\ndata: digits\nbatch: 50\nepochs: 1\n"


def checked(text="", *overrides):
    return check((BASE + text).encode(), "run.yaml", overrides)[0]


@pytest.mark.parametrize("name", ["MomentumSGD", "momentum_sgd", "momentum-sgd", "Momentum SGD", "MOMENTUM_SGD"])
def test_names_are_found_in_any_case(name):
    assert checked(f"optimizer: {name}").optimizer.name == "momentum_sgd"
    assert checked(f"optimizer: {{name: {name}, lr: 0.5}}").optimizer.lr == 0.5


@pytest.fixture
def own_parts(folder):
    (folder / "door.py").write_text(OWN_PARTS)
    yield
    sys.modules.pop("door", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("metrics=['door:nothing']", "has no 'nothing'"),
        ("extensions=[{name: 'door:Note', args: {wort: 1}}]", "takes no 'wort', did you mean 'word'?"),
        ("extensions=[{name: 'door:Note', args: {word: 1}, every: often}]", "extensions.0.every: expected a period"),
        ("optimizer={name: momentum_sgd, LR: 1}", "optimizer.LR: unknown key, did you mean 'lr'?"),
        ("extensions=[5]", "expected the name of an extension: package.module:callable"),
        ("init_from=nowhere.npz", "init_from: nowhere.npz: No such file or directory"),
        ("init_from=run.yaml", "init_from: run.yaml: cannot be read as an .npz file"),
        ("init_from={path: x, skipp: [a]}", "init_from.skipp: unknown key, did you mean 'skip'?"),
    ],
)
def test_mistakes(run, own_parts, words, message):
    code, _, err = run("run.yaml", words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_version(run):
    assert run("--version")[:2] == (0, f"dbrdist {dbrdist.__version__}\n")
    assert run("--version", "--init", "digits")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_init_prints_a_commented_configuration(run, name):
    code, out, _ = run("--init", name)
    assert code == 0
    assert "#" in out
    assert isinstance(check(out.encode(), "x.yaml")[0], Config)
    assert out == (ROOT / "examples" / name / "config.yaml").read_text()
    code, _, err = run("--init", "nothing")
    assert code == 2 and "(digits, cifar10, imagenet), got 'nothing'" in err


@pytest.mark.programs
@pytest.mark.timeout(120)
def test_a_run_whose_terminal_is_closed_saves_and_ends_with_75(tmp_path):
    """As by a lost ssh connection: the kernel sends SIGHUP to all processes of the terminal, and words have no way."""
    (tmp_path / "c.yaml").write_text("model: mlp\ndata: digits\nbatch: 50\nepochs: 100000\nworkers: 1\nout: run\n")
    words = [sys.executable, "-m", "dbrdist.cli.train", "c.yaml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TERM": "xterm"}
    child, terminal = pty.fork()
    if not child:
        try:
            os.chdir(tmp_path)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup
            os.execve(words[0], words, environment)
        finally:
            os._exit(127)
    heard = b""
    while b" left" not in heard:  # the bar is there
        heard += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped" and "SIGHUP arrived on rank 0" in summary["reason"]
    assert (tmp_path / "run" / f"snapshot_iter_{summary['iterations']}").exists()


@each(words=[(), ("model=nonsense",), ("data.root=nowhere",), ("--resume",), ("batch=100000",), ("iterations=1",)])
def test_signals_are_as_before_after_a_run_that_was_refused_or_over(run, words):
    """One that had begun to listen and then was refused kept its handlers, in a notebook or a program with several."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    run("run.yaml", "iterations=2")  # the folder has a run, which is in the way
    run("run.yaml", *words)
    assert [signal.getsignal(number) for number in numbers] == before
