"""Keys that recipes for large batches need, seen in runs of `dbrdist-train`."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist import links as L
from dbrdist.core.files.serializer import read_npz
from tests.cli.cli_helpers import lines
from tests.each import each

pytestmark = pytest.mark.slow  # whole runs
DIGITS = """
model: {name: "ofbn:Net"}
data: digits
batch: 100
epochs: 4
optimizer: {name: corrected_momentum_sgd, lr: 0.05}
evaluation: {every: 1 epoch}
log: {every: 1 iteration}
out: result
"""
NET = """
import dbrdist
import dbrdist.functions as F
import dbrdist.links as L


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(64, 16)
            self.bn = L.BatchNormalization(16)
            self.out = L.Linear(16, 10)
        self.seen = []

    def forward(self, x):
        h = self.hidden(x)
        self.seen.append(h.array)
        return self.out(F.relu(self.bn(h)))
"""


@pytest.fixture
def digits(run, tmp_path):
    """Runs a configuration on the digits with more keys."""
    (tmp_path / "ofbn.py").write_text(NET)
    (tmp_path / "digits.yaml").write_text(DIGITS)

    def call(*words):
        code, out, err = run("digits.yaml", *words)
        assert code == 0, err
        return out

    return call


# ---- the end of a run -----------------------------------------------------------------------------------------------


def test_a_run_ends_at_its_target(digits):
    digits("out=straight", "epochs=6")
    accuracies = [e["validation/main/accuracy"] for e in lines("straight/log.jsonl") if "validation/main/accuracy" in e]
    target = accuracies[2]
    assert target > max(accuracies[:2])
    out = digits("epochs=6", f"stop.target={target}")
    words = f"validation/main/accuracy is {target:.6g} after 3 epochs: the target of {target:g} is reached"
    assert words in " ".join(out.split())
    summary = json.loads(Path("result/summary.json").read_text())
    assert (summary["status"], summary["epochs"]) == ("finished", 3.0)
    assert "the target of" in summary["reason"]
    assert lines("result/log.jsonl")[-1]["validation/main/accuracy"] == target
    assert int(read_npz(f"result/snapshot_iter_{summary['iterations']}")["updater/iteration"]) == summary["iterations"]
    assert "is the end of this run, after 45 steps" in digits("epochs=6", f"stop.target={target}", "--resume")
    assert "finished: 4 epochs" in digits("epochs=4", "stop.target=1.5", "--resume")


def test_a_run_ends_without_progress(digits):
    """After the first two losses in a row that are not better than all before, as the log of a whole run has them."""
    words = ("optimizer.lr=2", "epochs=12", "log.every=1 epoch")
    digits(*words, "out=straight")
    losses = [entry["validation/main/loss"] for entry in lines("straight/log.jsonl")]
    for mode, best in (("min", min), ("max", max)):
        waits = [best(losses[:k]) in losses[k - 2 : k] for k in range(3, 13)]
        expected = waits.index(False) + 3 if False in waits else 12
        out = digits(*words, "stop.metric=validation/main/loss", "stop.patience=2", f"stop.mode={mode}", f"out={mode}")
        assert f"finished: {expected} epochs" in out
        assert ("for 2 evaluations in a row" in " ".join(out.split())) == (False in waits)


def test_a_goal_needs_a_reason(run, tmp_path):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace("ofbn:Net", "builtins:print"))
    code, _, err = run("digits.yaml", "stop.mode=max")
    assert code == 2
    assert "stop.target: expected target, patience or both, got neither" in err


# ---- evaluations ----------------------------------------------------------------------------------------------------


@each(**{"every, offset, expected": [("2 epochs", 1, [1, 3, 4]), ("3 epochs", 2, [2, 4]), ("2 epochs", 0, [2, 4])]})
def test_evaluations_with_an_offset(digits, every, offset, expected):
    digits(f"evaluation.every={every}", f"evaluation.offset={offset}", "log.every=1 epoch", "--overwrite")
    found = [e["epoch"] for e in lines("result/log.jsonl") if "validation/main/loss" in e]
    assert found == expected


def test_an_offset_is_less_than_the_period(run, tmp_path):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace("ofbn:Net", "builtins:print"))
    _, _, err = run("digits.yaml", "evaluation.every=2 epochs", "evaluation.offset=2")
    assert "evaluation.offset: must be less than the period, 2 epochs, got 2" in err
    _, _, err = run("digits.yaml", "evaluation.every=3 iterations", "evaluation.offset=0.5")
    assert "evaluation.offset: expected a whole number of iterations, got 0.5" in err


def test_outputs_are_means_over_mirror_images(digits, tmp_path):
    """Against the trained network by hand; the network sees each test image twice."""
    digits("evaluation.flip=true", "model=lenet", "epochs=1")
    net = dbrdist.load("result")
    _, test = dbrdist.datasets.get_digits(ndim=3)
    x, t = (np.array(column) for column in zip(*test[:]))
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        scores = (net(x).array + net(np.ascontiguousarray(x[:, :, :, ::-1])).array) / 2
        plain = net(x).array
    found = lines("result/log.jsonl")[-1]["validation/main/loss"]
    log = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    assert found == pytest.approx(-log[np.arange(len(t)), t].mean(), rel=1e-5)
    assert np.abs(plain - scores).max() > 1e-3


def test_top_k_accuracy_is_reported(digits):
    digits("metrics=[{name: top_k_accuracy, k: 3}, top_k_accuracy]", "epochs=1")
    last = lines("result/log.jsonl")[-1]
    assert last["validation/main/accuracy"] <= last["validation/main/top3_accuracy"] <= 1
    assert last["validation/main/top3_accuracy"] <= last["validation/main/top5_accuracy"]
    assert last["main/top5_accuracy"] > 0.5


def test_a_binary_cross_entropy_starts_where_its_formula_says(digits):
    """Scores near 0 give ln 2 for each class; the network learns from it."""
    digits("loss={name: binary_cross_entropy, label_smoothing: 0.1, threshold: 0.2}", "optimizer.lr=0.5")
    log = lines("result/log.jsonl")
    assert 0.5 < log[0]["main/loss"] < 1.2
    assert log[-1]["validation/main/accuracy"] > 0.8
    digits("loss={name: binary_cross_entropy, sum_classes: true}", "out=sum", "optimizer.lr=1e-9", "iterations=1")
    digits("loss={name: binary_cross_entropy, sum_classes: false}", "out=mean", "optimizer.lr=1e-9", "iterations=1")
    first = [lines(f"{out}/log.jsonl")[0]["main/loss"] for out in ("sum", "mean")]
    assert first[0] == pytest.approx(10 * first[1], rel=1e-6)


# ---- averages of the weights ----------------------------------------------------------------------------------------


@each(
    **{
        "words, decay, every": [
            (("ema.half_life=2 iterations",), 0.5**0.5, 1),
            (("ema.half_life=1 epoch", "ema.every=3"), 0.5 ** (3 / 15), 3),
            (("ema.decay=0.75", "ema.every=2"), 0.75, 2),
        ]
    }
)
def test_an_average_by_its_half_life(digits, words, decay, every):
    words = (*words, "ema.warmup=false", "snapshot.every=1 iteration", "snapshot.keep=9", "--overwrite")
    digits(*words, "iterations=6", "optimizer.lr=0.5")
    weights = [read_npz(f"result/snapshot_iter_{k}") for k in range(1, 7)]
    key = next(k for k in weights[0] if k.endswith("predictor/hidden/W") and "WeightAverage" not in k)
    own = [w[key] for w in weights]
    averages = [w[next(k for k in w if "WeightAverage" in k and k.endswith("hidden/W"))] for w in weights]
    for k in range(1, 6):
        is_moved = (k + 1) % every == 0
        expected = decay * averages[k - 1] + (1 - decay) * own[k] if is_moved else averages[k - 1]
        np.testing.assert_allclose(averages[k], expected, rtol=1e-5, atol=1e-7)


@each(
    **{"words, error": [(["ema={warmup: false}"], "got none"), (["ema={decay: 0.5, half_life: 1 epoch}"], "got both")]}
)
def test_an_average_has_a_decay_or_a_half_life(run, tmp_path, words, error):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace("ofbn:Net", "builtins:print"))
    assert f"expected either decay or half_life, {error}" in run("digits.yaml", *words)[2]


# ---- batch normalization --------------------------------------------------------------------------------------------


def statistics(path):
    saved = read_npz(path)
    return [saved[f"updater/model:main/predictor/bn/{name}"] for name in ("avg_mean", "avg_var")]


def test_the_statistics_of_the_last_batch(digits):
    """As the batch was normalized: with the biased variance, and no average over batches."""
    digits("batch_norm.statistics=last", "iterations=2", "snapshot.every=1 iteration", "workers=0")
    before = read_npz("result/snapshot_iter_1")
    train, _ = dbrdist.datasets.get_digits(ndim=3)
    order = dbrdist.datasets.loading.base and dbrdist.core.array.random.permutation(0, 0, len(train))
    x = np.stack([train[i][0] for i in order[100:200]]).reshape(100, -1)
    W, b = (before[f"updater/model:main/predictor/hidden/{name}"].astype(float) for name in "Wb")
    h = x @ W.T + b
    mean, var = statistics("result/snapshot_iter_2")
    np.testing.assert_allclose(mean, h.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var, h.var(0), rtol=1e-4)


def test_virtual_workers_average_the_statistics_of_their_last_batches(digits):
    """Means of means and of variances: the variance of the pooled batch is larger by that of the means."""
    batch = "batch={virtual_workers: 4, per_worker: 25}"
    digits(batch, "batch_norm.statistics=last", "iterations=2", "snapshot.every=1 iteration")
    before = read_npz("result/snapshot_iter_1")
    train, _ = dbrdist.datasets.get_digits(ndim=3)
    order = dbrdist.core.array.random.permutation(0, 0, len(train))
    x = np.stack([train[i][0] for i in order[100:200]]).reshape(4, 25, -1)
    W, b = (before[f"updater/model:main/predictor/hidden/{name}"].astype(float) for name in "Wb")
    h = x @ W.T + b
    mean, var = statistics("result/snapshot_iter_2")
    np.testing.assert_allclose(mean, h.mean(1).mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var, h.var(1).mean(0), rtol=1e-4)
    pooled = h.reshape(100, -1).var(0)
    np.testing.assert_allclose(h.var(1).mean(0) + h.mean(1).var(0), pooled, rtol=1e-12)
    assert (pooled > 1.001 * var).any()


@each(batch=["100", "{virtual_workers: 4, per_worker: 25}"])
def test_statistics_are_recalibrated_with_the_weights_of_the_moment(digits, batch):
    words = (
        "batch_norm.statistics=recalibrated",
        "batch_norm.batches=3",
        "iterations=2",
        "evaluation.every=2 iterations",
    )
    digits(f"batch={batch}", *words, "--overwrite")
    saved = read_npz("result/snapshot_iter_2")
    train, _ = dbrdist.datasets.get_digits(ndim=3)
    order = dbrdist.core.array.random.permutation(0, 0, len(train))
    size = 100 if batch == "100" else 25
    x = np.stack([train[i][0] for i in order[:300]]).reshape(300 // size, size, -1)
    W, b = (saved[f"updater/model:main/predictor/hidden/{name}"].astype(float) for name in "Wb")
    h = x @ W.T + b
    mean, var = statistics("result/snapshot_iter_2")
    np.testing.assert_allclose(mean, h.mean(1).mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var, h.var(1, ddof=1).mean(0), rtol=1e-4)


def test_recalibration_draws_no_number_of_the_run(digits):
    """The weights of a run with and without are the same bits."""
    for statistics_ in ("running", "recalibrated"):
        digits(
            "model={name: mlp, dropout: 0.5}", f"batch_norm.statistics={statistics_}", f"out={statistics_}", "epochs=2"
        )
    first, second = (read_npz(f"{out}/snapshot_iter_30") for out in ("running", "recalibrated"))
    keys = [k for k in first if k.startswith("updater/model:main/")]
    assert keys
    for key in keys:
        np.testing.assert_array_equal(first[key], second[key])


def test_the_eps_of_batch_normalization(digits, run):
    """The loss of the first batch by hand; a resumed run keeps it, and the network that is loaded has it."""
    digits("batch_norm.eps=0.25", "iterations=1", "snapshot.every=1 iteration", "optimizer.lr=1e-12")
    saved = read_npz("result/snapshot_iter_1")
    train, _ = dbrdist.datasets.get_digits(ndim=3)
    order = dbrdist.core.array.random.permutation(0, 0, len(train))[:100]
    x, t = (np.array([train[i][k] for i in order]) for k in (0, 1))
    named = {name: saved[f"updater/model:main/predictor/{name}"].astype(float)
             for name in ("hidden/W", "hidden/b", "bn/gamma", "bn/beta", "out/W", "out/b")}  # fmt: skip
    h = x.reshape(100, -1) @ named["hidden/W"].T + named["hidden/b"]
    h = (h - h.mean(0)) / np.sqrt(h.var(0) + 0.25) * named["bn/gamma"] + named["bn/beta"]
    y = np.maximum(h, 0) @ named["out/W"].T + named["out/b"]
    expected = np.log(np.exp(y).sum(1)) - y[np.arange(100), t]
    assert lines("result/log.jsonl")[0]["main/loss"] == pytest.approx(expected.mean(), rel=1e-5)
    assert dbrdist.load("result", model=__import__("ofbn").Net).bn.eps == 0.25
    code, _, err = run("digits.yaml", "batch_norm.eps=0.5", "--resume")
    assert code == 2
    assert "batch_norm.eps: the run began with 0.25" in err
    _, _, err = run("digits.yaml", "batch_norm.eps=0", "out=other")
    assert "batch_norm.eps: must be greater than 0, got 0" in err


# ---- gradients and repetition ---------------------------------------------------------------------------------------


def test_gradients_of_virtual_workers_are_rounded(digits):
    batch = "batch={virtual_workers: 4, per_worker: 25}"
    for dtype in ("null", "bfloat16", "float16"):
        digits(batch, "reproducible=true", f"gradient_dtype={dtype}", "iterations=1", f"out={dtype}")
    key = "updater/model:main/predictor/hidden/W"
    exact, coarse, fine = (read_npz(f"{out}/snapshot_iter_1")[key] for out in ("null", "bfloat16", "float16"))
    assert 0 < np.abs(fine - exact).max() < np.abs(coarse - exact).max() < 1e-3


def test_repeats_show_fewer_images_more_often(digits):
    out = digits("repeats=2", "epochs=1")
    assert "steps: 15 per epoch" in out
    assert lines("result/log.jsonl")[-1]["epoch"] == 1


def test_repeats_fit_into_the_batch(run, tmp_path):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace('{name: "ofbn:Net"}', "mlp"))
    code, _, err = run("digits.yaml", "repeats=101")
    assert code == 2
    assert "repeats: must be at most the batch, 100, got 101" in err


def test_what_does_not_go_together_is_refused(run, tmp_path):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace('{name: "ofbn:Net"}', "mlp"))
    _, _, err = run("digits.yaml", "batch={virtual_workers: 2, per_worker: 4}", "batch_norm.group=2")
    assert "batch_norm.group: virtual workers normalize their own batches" in err
    _, _, err = run("digits.yaml", "gradient_dtype=float16", "compression=power_sgd")
    assert "gradient_dtype: compression: power_sgd sends in its own way" in err


def test_a_group_of_one_rank_changes_nothing(digits):
    digits("batch_norm.group=4", "iterations=2")
    assert isinstance(dbrdist.load("result", model=__import__("ofbn").Net).bn, L.BatchNormalization)


# ---- the ends of epochs ---------------------------------------------------------------------------------------------


@each(**{"last, steps, sizes": [("short", 45, 42), ("wrap", 44, 100), ("drop", 42, 100)]})
def test_the_last_batch_of_an_epoch(digits, last, steps, sizes):
    """1,442 examples in batches of 100 over three epochs: 3 x 15, 43.26 and 3 x 14 steps."""
    out = digits(f"last_batch={last}", "epochs=3", "audit=true", "--overwrite")
    summary = json.loads(Path("result/summary.json").read_text())
    assert summary["iterations"] == steps
    assert f"about {steps} in all" in " ".join(out.split())
    used = [line.split() for line in Path("result/audit/start-0001-rank-00000.txt").read_text().splitlines()[2:]]
    numbers = [sum(len(words) - 3 for words in used if words[0] == str(step)) for step in range(1, steps + 1)]
    assert min(numbers) == sizes
    first = [int(i) for words in used if words[1] == "0" for i in words[3:]]
    assert len(first) == len(set(first)) == (1400 if last == "drop" else 1442)
    found = [entry["epoch_detail"] for entry in lines("result/log.jsonl")]
    per_epoch = 1442 if last == "wrap" else 1400 if last == "drop" else None
    if per_epoch:
        assert found == pytest.approx([100 * (k + 1) / per_epoch for k in range(steps)], rel=1e-12)


@each(last=["wrap", "drop"])
def test_the_ends_of_epochs_with_virtual_workers(digits, last, run):
    """The same bits in one piece and resumed within an epoch; wrapped batches have examples of both epochs."""
    words = ("batch={virtual_workers: 4, per_worker: 25}", f"last_batch={last}", "epochs=2", "reproducible=true")
    digits(*words, "out=straight", "--overwrite")
    digits(*words, "out=cut", "iterations=17", "--overwrite")
    digits(*words, "out=cut", "--resume")
    steps = 29 if last == "wrap" else 28
    first, second = (read_npz(f"{out}/snapshot_iter_{steps}") for out in ("straight", "cut"))
    for key in first:
        if key.startswith("updater/model:main/"):
            np.testing.assert_array_equal(first[key], second[key])


SCHEDULES = {
    "polynomial": "{name: polynomial, power: 2, begin: warmup, warmup_epochs: 0.7, end: 1e-4}",
    "cosine": "{name: cosine, begin: warmup, warmup_epochs: 1, warmup_start: 0.01, whole_epochs: true}",
    "linear": "{name: piecewise_linear, points: [[0, 1e-4], [0.5, 1], [2.25, 0]]}",
    "step": "{name: step, milestones: [0, 1, 2], factors: [0.5, 0.075, 0.01]}",
}
WORKERS = "batch={virtual_workers: 4, per_worker: 27}"


@pytest.mark.parametrize(
    "name, words",
    [
        ("polynomial", ["last_batch=short", "accumulate=3"]),
        ("step", ["last_batch=short", WORKERS]),
        ("linear", ["last_batch=wrap", WORKERS]),
        ("step", ["last_batch=wrap", "accumulate=3"]),
        ("cosine", ["last_batch=drop", "repeats=3"]),
        ("linear", ["last_batch=drop"]),
    ],
)
def test_a_run_follows_the_table_of_its_schedule(digits, run, name, words):
    """At every step of 2.3 epochs, also where the run is cut within an epoch and resumed."""
    words = [*words, "epochs=2.3", f"optimizer.schedule={SCHEDULES[name]}"]
    assert run("digits.yaml", *words, "--schedule", "s.csv", "--examples", "1442")[0] == 0
    with open("s.csv", newline="") as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    digits(*words, "iterations=20")
    digits(*words, "--resume")
    log = lines("result/log.jsonl")
    assert [entry["lr"] for entry in log] == pytest.approx(rates, rel=1e-12, abs=1e-15)
    size = 108 if WORKERS in words else 100
    per_epoch = {"short": -(-1442 // size), "wrap": 1442 / size, "drop": 1442 // size}[words[0].partition("=")[2]]
    done = 2 * per_epoch + (0.3 * 1442 / size if "last_batch=short" in words else 0.3 * per_epoch)
    assert len(rates) == math.ceil(done)  # worked out here, by the sizes of the batches


def test_two_scheduled_sizes_have_the_names_of_their_keys(digits, run):
    sizes = "transforms.train=[{name: random_crop, size: [[0, 6], [1, 8]]}, {name: resize, size: [[0, 8], [2, 6]]}]"
    code, _, err = run("digits.yaml", "model=mlp", sizes, "--schedule", "s.csv", "--examples", "1442")
    assert code == 0, err
    with open("s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["iteration", "epoch", "lr", "transforms.train.0.size", "transforms.train.1.size"]
    assert [(rows[15 * epoch]["transforms.train.0.size"], rows[15 * epoch]["transforms.train.1.size"])
            for epoch in range(4)] == [("6", "8"), ("8", "8"), ("8", "6"), ("8", "6")]  # fmt: skip


def test_ends_of_epochs_that_cannot_be(run, tmp_path):
    (tmp_path / "digits.yaml").write_text(DIGITS.replace('{name: "ofbn:Net"}', "mlp"))
    code, _, err = run("digits.yaml", "last_batch=drop", "batch=1443")
    assert code == 2
    assert "last_batch: drop leaves out all 1,442 training examples, which are fewer than the batch of 1,443" in err
    _, _, err = run("digits.yaml", "last_batch=drop", "batch=9", "--schedule", "s.csv", "--examples", "8")
    assert "drop leaves out all 8 examples, which are fewer than the batch of 9" in err
    _, _, err = run("digits.yaml", "last_batch=wrap", "repeats=2")
    assert "last_batch: wrap mixes two epochs in a batch, which repeats: 2 does not allow" in err
    crop = "transforms.train=[{name: random_crop, size: [[0, 6], [2, 8]]}]"
    _, _, err = run("digits.yaml", "last_batch=wrap", crop)
    assert "which transforms.train: the size of random_crop does not allow; take short or drop" in err


# ---- two ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.programs
@pytest.mark.mpiexec
@pytest.mark.slow
def test_statistics_and_gradients_over_two_ranks(several, run, tmp_path):
    """A group of both ranks normalizes as one rank does; virtual workers give the same bits; 16 bits round a little."""
    (tmp_path / "ofbn.py").write_text(NET)
    (tmp_path / "digits.yaml").write_text(DIGITS)
    workers = ["batch={virtual_workers: 4, per_worker: 25}", "reproducible=true", "gradient_dtype=float16"]
    measured = ["batch_norm.statistics=recalibrated", "batch_norm.batches=2"]
    cases = {
        "group": ["batch_norm.group=2"],
        "apart": [],
        "narrow": ["batch_norm.group=2", "gradient_dtype=bfloat16", "communicator=naive"],
        "last": ["batch_norm.statistics=last", *workers],
        "measured": [*measured, *workers],
        "goal": ["stop.target=0.5", "evaluation.every=5 iterations", "evaluation.offset=1"],
    }
    common = ["epochs=1"]
    outcomes = several(2, *([["digits.yaml", f"out=two-{name}", *words, *common] for name, words in cases.items()]))
    for name, (code, out, err) in zip(cases, outcomes):
        assert code == 0, (name, out, err)
    for name, words in cases.items():
        own = [] if name == "narrow" else words
        assert run("digits.yaml", f"out=one-{name}", *own, *common)[0] == 0
    one, two = ({name: lines(f"{n}-{name}/log.jsonl") for name in cases} for n in ("one", "two"))

    def losses(log):
        return np.array([entry["main/loss"] for entry in log])

    np.testing.assert_allclose(losses(two["group"]), losses(one["group"]), rtol=1e-4)
    assert np.abs(losses(two["apart"]) - losses(one["apart"])).max() > 1e-3
    difference = np.abs(losses(two["narrow"]) - losses(two["group"])).max()
    assert 0 < difference < 0.05
    for name in ("last", "measured"):
        assert losses(two[name]).tolist() == losses(one[name]).tolist()
        assert two[name][-1]["validation/main/loss"] == one[name][-1]["validation/main/loss"]
    assert len(two["goal"]) < 15
    assert two["goal"][-1]["validation/main/accuracy"] >= 0.5
