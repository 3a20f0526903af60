"""Each recipe of examples/imagenet trains a few steps on real photographs, and its schedules are those of its paper.

Rates are worked out here from the papers' formulas, or are those of published logs.
"""

import csv
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from dbrdist.cli.configuration import load
from dbrdist.cli.running import rehearsal
from dbrdist.datasets import block_bounds
from tests.cli.cli_helpers import ROOT, lines
from tests.each import each

FOLDER = ROOT / "examples" / "imagenet"
NUM = 1_281_167
PARTS = ("base", "mlperf-lars", "ffcv", "rsb", "sample", "config")  # what is no recipe by itself
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in PARTS)


def cosine(epoch, lr, total, warm, start=0.0, end=0.0, begin=None):
    begin = warm if begin is None else begin

    def fall(e):
        return end + (lr - end) * (1 + math.cos(math.pi * (e - begin) / (total - begin))) / 2

    return fall(epoch) if epoch >= warm else start + (fall(warm) - start) * epoch / warm


def polynomial(epoch, lr, total, warm):
    if epoch < warm:
        return lr * epoch / warm
    return 1e-4 + (lr - 1e-4) * (1 - (epoch - warm) / (total - warm)) ** 2


def goyal(epoch):
    if epoch < 5:
        return 0.1 + 3.1 * epoch / 5
    return 3.2 * 0.1 ** sum(epoch >= m for m in (30, 60, 80))


def akiba(epoch):
    return 12.8 * (0.5 if epoch < 40 else 0.075 if epoch < 70 else 0.01 if epoch < 85 else 0.001)


def ffcv(epoch, total):
    return 1.7 * (1e-4 + (1 - 1e-4) * epoch / 2 if epoch < 2 else (total - epoch) / (total - 2))


RATES = {
    "goyal2017": goyal,
    "akiba2017": akiba,
    "you2017-lars": lambda e: polynomial(e, 32.0, 90, 14),
    "mlperf-lars-4k": lambda e: polynomial(e, 10.0, 42, 5),
    "mlperf-lars-8k": lambda e: polynomial(e, 17.0, 44, 5),
    "mlperf-lars-32k": lambda e: polynomial(e, 21.2, 58, 16),
    "mlperf-lars-64k": lambda e: polynomial(e, 24.699, 89, 31),
    "nvidia-dle": lambda e: cosine(e, 2.048, 90, 8),
    "ffcv-16": lambda e: ffcv(e, 16),
    "ffcv-32": lambda e: ffcv(e, 32),
    "ffcv-88": lambda e: ffcv(e, 88),
    "mosaic-mild": lambda e: cosine(e, 2.048, 28.8, 8),
    "rsb-a3": lambda e: cosine(e, 8e-3, 100, 5, 1e-6, 1e-6, 0),
    "rsb-a1": lambda e: cosine(e, 5e-3, 600, 5, 1e-6, 1e-6, 0),
    "torchvision-v2": lambda e: cosine(math.floor(e), 0.5, 600, 5, 0.005),
    "chainer-example": lambda e: 0.01,
}
BATCHES = {
    "goyal2017": 8192, "akiba2017": 32768, "you2017-lars": 32768, "mlperf-lars-4k": 4096, "mlperf-lars-8k": 8192,
    "mlperf-lars-32k": 32768, "mlperf-lars-64k": 65536, "nvidia-dle": 2048, "ffcv-16": 4096, "ffcv-32": 4096,
    "ffcv-88": 4096, "mosaic-mild": 2048, "rsb-a3": 2048, "rsb-a1": 2048, "torchvision-v2": 1024,
    "chainer-example": 256,
}  # fmt: skip
WRAP = ("akiba2017", "chainer-example")  # batches go on in the next epoch
DROP = ("nvidia-dle", "ffcv-16", "ffcv-32", "ffcv-88", "mosaic-mild", "rsb-a3", "rsb-a1")  # the last batch is left out


SKIP = {"optimizer.hooks.0.skip": ["*/gamma", "*/beta"]}
NORMAL = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MLPERF = {
    "optimizer.name": "lars", "optimizer.trust_coefficient": 0.001, "optimizer.eps": 0.0, "optimizer.hooks": [],
    "optimizer.schedule.power": 2, "optimizer.schedule.end": 1e-4, "optimizer.schedule.begin": "warmup",
    "loss.label_smoothing": 0.1, "evaluation.every": "4 epoch", "stop.target": 0.759,
    "stop.metric": "validation/main/accuracy", "optimizer.skip_vectors": True, "model.stride_in_3x3": True,
}  # fmt: skip
RSB = {
    "optimizer.name": "lamb", "loss.name": "binary_cross_entropy", "optimizer.schedule.warmup_epochs": 5,
    "optimizer.schedule.name": "cosine", "train.rand_augment.std": 0.5, "train.rand_augment.increasing": True,
    "train.cutmix.alpha": 1, "train.cutmix.per_batch": True, "train.mixup.per_batch": True,
    "optimizer.skip_vectors": True, "test.resize.size": 235, "test.center_crop.size": 224,
    "train.random_resized_crop.method": "bicubic", "test.resize.method": "bicubic",
}  # fmt: skip
FFCV = {
    "optimizer.lr": 1.7, "optimizer.momentum": 0.9, "optimizer.hooks.0.rate": 1e-4, "loss.label_smoothing": 0.1,
    "model.blur_pooling": "convolutions", "test.center_resized_crop.size": 256, "evaluation.flip": True,
    "test.center_resized_crop.ratio": 224 / 256, "batch.virtual_workers": 8, "batch.per_worker": 512,
}  # fmt: skip
PUBLISHED = {  # what the papers, programs and lists of results say beside rates and batches
    "goyal2017": {
        "epochs": 90, "batch.per_worker": 32, "optimizer.momentum": 0.9, "optimizer.name": "corrected_nesterov_ag",
        "optimizer.hooks.0.rate": 1e-4, "model.zero_gamma": True, "model.stride_in_3x3": True,
        "train.random_resized_crop.size": 224, "test.resize.size": 256, "test.center_crop.size": 224,
        "loss.label_smoothing": 0.0, "batch_norm.statistics": "running", "batch_norm.group": 1, **SKIP,
    },
    "akiba2017": {
        "epochs": 90, "batch.virtual_workers": 1024, "batch.per_worker": 32, "optimizer.name": "rmsprop_warmup",
        "optimizer.momentum": 0.9, "optimizer.alpha": 0.99, "optimizer.eps": 1e-8, "optimizer.lr_rmsprop": 3e-4,
        "schedules.0.of": "optimizer.a_sgd", "schedules.0.schedule.center": 10, "schedules.0.schedule.period": 5,
        "schedules.0.schedule.literal": False, "gradient_dtype": "float16", "batch_norm.statistics": "last",
        "optimizer.hooks.0.rate": 1e-4, "model.zero_gamma": True, "model.stride_in_3x3": True, **SKIP,
    },
    "you2017-lars": {
        "epochs": 90, "optimizer.name": "lars", "optimizer.momentum": 0.9, "optimizer.trust_coefficient": 0.001,
        "optimizer.schedule.power": 2, "optimizer.schedule.begin": "warmup", "optimizer.hooks": [],
    },
    "mlperf-lars-4k": {"optimizer.momentum": 0.9, "optimizer.weight_decay": 2e-4, "batch.per_worker": 64, **MLPERF},
    "mlperf-lars-8k": {"optimizer.momentum": 0.9, "optimizer.weight_decay": 2e-4, "batch.per_worker": 64, **MLPERF},
    "mlperf-lars-32k": {
        "optimizer.momentum": 0.94, "optimizer.weight_decay": 2.5e-5, "batch.per_worker": 128, **MLPERF,
    },
    "mlperf-lars-64k": {
        "optimizer.momentum": 0.951807, "optimizer.weight_decay": 1e-4, "batch.per_worker": 128, **MLPERF,
    },
    "nvidia-dle": {
        "epochs": 90, "optimizer.momentum": 0.875, "optimizer.hooks.0.rate": 1 / 32768, "loss.label_smoothing": 0.1,
        "batch.virtual_workers": 8, **SKIP,
    },
    "ffcv-16": FFCV, "ffcv-32": FFCV, "ffcv-88": FFCV,
    "mosaic-mild": {
        "epochs": 28.8, "optimizer.momentum": 0.875, "optimizer.hooks.0.name": "decoupled_weight_decay",
        "optimizer.hooks.0.rate": 5e-4, "loss.name": "binary_cross_entropy", "loss.label_smoothing": 0.08,
        "ema.half_life": "100 iteration", "model.blur_pooling": "all", "model.log_constant_bias": True,
        "test.resize.size": 232, "test.center_crop.size": 224,
    },
    "rsb-a3": {
        "epochs": 100, "optimizer.weight_decay_rate": 0.02, "train.rand_augment.magnitude": 6, "train.mixup.alpha": 0.1,
        "train.random_resized_crop.size": 160, "loss.label_smoothing": 0.0, "model.stochastic_depth": 0.0,
        "repeats": 1, **RSB,
    },
    "rsb-a1": {
        "epochs": 600, "optimizer.weight_decay_rate": 0.01, "train.rand_augment.magnitude": 7, "train.mixup.alpha": 0.2,
        "train.random_resized_crop.size": 224, "loss.label_smoothing": 0.1, "model.stochastic_depth": 0.05,
        "repeats": 3, **RSB,
    },
    "torchvision-v2": {
        "epochs": 600, "optimizer.momentum": 0.9, "optimizer.hooks.0.rate": 2e-5, "loss.label_smoothing": 0.1,
        "train.mixup.alpha": 0.2, "train.cutmix.alpha": 1, "train.mixup.per_batch": True, "repeats": 4,
        "train.cutmix.per_batch": True, "train.trivial_augment.name": "trivial_augment", "train.random_erasing.p": 0.1,
        "ema.every": 32, "ema.decay": 1 - (1 - 0.99998) * 1024 * 32 / 600, "train.random_resized_crop.size": 176,
        "train.random_resized_crop.method": "bilinear", "test.resize.size": 232, "test.center_crop.size": 224,
        "test.resize.method": "bilinear", **SKIP,
    },
    "chainer-example": {
        "epochs": 10, "optimizer.name": "momentum_sgd", "optimizer.momentum": 0.9, "optimizer.hooks": [],
        "train.random_crop.size": 224, "data.resize": [256, 256], "model.stride_in_3x3": False,
        "model.zero_gamma": False, "model.variant": "chainer", "batch_norm.eps": 2e-5, "batch.per_worker": 32,
        "train.normalize.mean": [123.57 / 255, 116.69 / 255, 103.77 / 255], "train.normalize.std": [1, 1, 1],
        "evaluation.batch": 250,
    },
}  # fmt: skip


def value_of(config, key):
    """A value of a configuration; `train` and `test` are its transforms by name."""
    section, *rest = key.split(".")
    if section in ("train", "test"):
        value = next(t for t in config["transforms"][section] if t["name"] == rest[0])
        rest = rest[1:]
    else:
        value = config[section]
    for part in rest:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values(name):
    config = load.load(FOLDER / f"{name}.yaml")[0].model_dump(mode="json")
    wanted = dict(PUBLISHED[name])
    if name != "chainer-example":
        wanted |= {f"{part}.normalize.{key}": value for part in ("train", "test") for key, value in NORMAL.items()}
    found = {key: value_of(config, key) for key in wanted}
    assert {key: found[key] for key in wanted if not are_same(found[key], wanted[key])} == {}


def are_same(found, wanted):
    """Numbers to six digits, as recipes are written."""
    if isinstance(wanted, str | bool) or not np.size(wanted) or isinstance(np.ravel(wanted)[0], str):
        return found == wanted
    return found is not None and np.allclose(found, wanted, rtol=2e-6, atol=0)


def epoch_at(name, step):
    """The epochs done before a step."""
    batch = BATCHES[name]
    if name in WRAP:
        return step * batch / NUM
    per_epoch = NUM // batch if name in DROP else -(-NUM // batch)
    return step // per_epoch + step % per_epoch * batch / (per_epoch * batch if name in DROP else NUM)


def test_all_recipes_are_tested_here():
    assert len(RECIPES) == 16
    assert set(RECIPES) == set(RATES) == set(BATCHES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name):
    config, _ = load.load(FOLDER / f"{name}.yaml")
    assert config.batch_size == BATCHES[name]
    assert config.out == f"result/{name}"
    header = "".join(line[1:] for line in (FOLDER / f"{name}.yaml").read_text().splitlines() if line.startswith("#"))
    for words in ("%" if name != "chainer-example" else "No accuracy", f"imagenet/{name}.yaml data.root=ROOT"):
        assert words in header
    assert "eviations" in header or "see mlperf-lars.yaml" in header
    assert "ithout a source" in header or "see ffcv.yaml" in header or name == "chainer-example"


def table(run, name, tmp_path, *words):
    code, out, err = run(FOLDER / f"{name}.yaml", *words, "--schedule", "s.csv", "--examples", NUM)
    assert code == 0, err
    with open("s.csv", newline="") as file:
        return list(csv.DictReader(file)), out


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_rates_are_those_of_the_paper(run, tmp_path, name):
    rows, out = table(run, name, tmp_path)
    assert f"{len(rows):,} steps of {BATCHES[name]:,} examples; iteration, epoch, lr" in " ".join(out.split())
    per_epoch = round(NUM / BATCHES[name])
    for i in {0, 1, *range(per_epoch - 2, per_epoch + 3), *np.linspace(0, len(rows) - 1, 200).astype(int)}:
        epoch = epoch_at(name, i)
        assert int(rows[i]["iteration"]) == i
        assert float(rows[i]["epoch"]) == pytest.approx(epoch, rel=1e-12)
        assert float(rows[i]["lr"]) == pytest.approx(RATES[name](epoch), rel=1e-9, abs=1e-12), epoch


@pytest.mark.slow
def test_the_share_of_sgd_stands_beside_the_rate(run, tmp_path):
    rows, _ = table(run, "akiba2017", tmp_path)
    assert len(rows) == 3519  # 90 epochs of 39.098 steps, as the paper's batches wrap around
    assert list(rows[0]) == ["iteration", "epoch", "lr", "a_sgd"]
    for row in rows[::7]:
        epoch, share = float(row["epoch"]), float(row["a_sgd"])
        exponential = math.exp(2 * (epoch - 10) / 5) / 2
        assert share == pytest.approx(exponential if epoch < 10 else min(0.5 + (epoch - 10) / 5, 1), rel=1e-12)
        rate_of_rmsprop = (1 - share) * 3e-4
        assert rate_of_rmsprop >= 0
    literal, _ = table(run, "akiba2017", tmp_path, "schedules.0.schedule.literal=true")
    assert max(float(row["a_sgd"]) for row in literal) == pytest.approx(1.5, abs=0.02)


@pytest.mark.slow
def test_ffcvs_rates_are_those_of_its_log(run, tmp_path):
    """Of 312 steps per epoch, as FFCV leaves out the last batch."""
    rows, _ = table(run, "ffcv-16", tmp_path)
    last = [float(rows[312 * epoch + 311]["lr"]) for epoch in (0, 1, 15)]
    assert last == pytest.approx([0.847360913, 1.697275913, 0.000389194], abs=5e-10)
    assert {int(rows[312 * epoch]["size"]) for epoch in range(12)} == {160}
    assert {int(rows[312 * epoch]["size"]) for epoch in range(12, 16)} == {192}


@pytest.mark.parametrize(
    "words, error",
    [
        (["--schedule", "s.csv"], "--schedule reads no data: give the number of training examples, --examples 1281167"),
        (["--schedule", "s.txt", "--examples", "9"], "expected the name of a file to write, FILE.csv, got 's.txt'"),
        (["--schedule", ".csv/x.csv", "--examples", "9"], "No such file or directory"),
        (["--examples", "9"], "--examples goes with --schedule or --rehearse"),
        (["--schedule", "s.csv", "--examples", "0"], "0 is not in the range"),
        (["--rehearse", "7x2", "--examples", "9"], "expected RANKSxPER_HOST, such as 1024x8"),
        (["--rehearse", "8", "--examples", "9"], "expected RANKSxPER_HOST, such as 1024x8"),
        (
            ["--rehearse", "8x8", "--examples", "9", "--trial", "8x2"],
            "--trial: expected WORKERSxIMAGES@PIXELS, such as",
        ),
        (["--rehearse", "8x8", "--examples", "9", "--trial", "0x2@64"], "of 2 images at 64 pixels, got '0x2@64'"),
        (["--rehearse", "512x8", "--examples", "9"], "512 ranks are more than the 256 virtual workers"),
        (["--schedule", "s.csv", "--examples", "9", "--resume"], "--schedule and --rehearse are used alone"),
    ],
)
def test_bad_words_are_refused(run, words, error):
    code, _, err = run(FOLDER / "goyal2017.yaml", *words)
    assert code == 2
    assert error in err


@each(
    **{
        "words, owners": [
            ("optimizer.a_sgd=1", "known here: name, hooks, schedule, lr, momentum; it is a key of rmsprop_warmup"),
            ("optimizer.trust_coefficient=1", "it is a key of corrected_lars, lars"),
            ("optimizer.schedule.power=2", "it is a key of polynomial"),
            ("model.channels=[1, 2]", "it is a key of lenet"),
            ("optimizer.nothing=2", "known here: name, hooks, schedule, lr, momentum\n"),
        ]
    }
)  # fmt: skip
def test_a_key_from_another_recipe_is_said_to_be_one(run, words, owners):
    code, _, err = run(FOLDER / "goyal2017.yaml", words, "--dry-run")
    assert code == 2
    assert owners in err


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """The 240 sample photographs, a class each."""
    data = Path(os.environ.get("DBRDIST_DATA", ROOT.parent / "shared" / "data"))
    tar = next((p for p in (data / "imagenet-sample.tar", Path("/nowhere")) if p.exists()), None)
    if tar is None:
        pytest.skip(f"there is no imagenet-sample.tar in {data}; set DBRDIST_DATA")
    folder = tmp_path_factory.mktemp("photographs")
    subprocess.run(["tar", "-xf", tar, "-C", folder], check=True)
    return folder / "imagenet-sample"


def small(name, photographs, out, steps):
    """Words for a run of a recipe at 64 pixels and a batch of 8, that of 4 virtual workers."""
    config, _ = load.load(FOLDER / f"{name}.yaml")
    words = [str(FOLDER / f"{name}.yaml"), f"data.root={photographs}", "data.train=.", "data.test=null"]
    for i, transform in enumerate(config.transforms.train):
        if hasattr(transform, "size"):
            words.append(f"transforms.train.{i}.size=64")
    words += ["batch={virtual_workers: 4, per_worker: 2}", f"iterations={steps}", "log.every=1 iteration", "threads=0"]
    return [*words, f"out={out}", "snapshot.best=null", "metrics=[]", "evaluation={}", "snapshot.every=1 epoch"]


def first_loss(name):
    """What the first loss of a network that knows nothing is near: with zero gamma the scores are small."""
    return {"mosaic-mild": (5, 16), "rsb-a3": (0.5, 1.0), "rsb-a1": (0.5, 1.0)}.get(name, (4.2, 8.0))


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.mpiexec
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_one_and_two_ranks(run, ranks, photographs, name):
    steps = 2
    code, _, err = run(*small(name, photographs, "one", steps))
    assert code == 0, err
    job = ranks(2, *small(name, photographs, "two", steps))
    out, err = job.communicate(timeout=800)
    assert job.returncode == 0, out + err
    one, two = lines("one/log.jsonl"), lines("two/log.jsonl")
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        assert a["lr"] == b["lr"] == pytest.approx(RATES[name](step * 8 / 240), rel=1e-9, abs=1e-12)
        assert a["main/loss"] == pytest.approx(b["main/loss"], rel=1e-3)
        assert math.isfinite(a["main/loss"])
    low, high = first_loss(name)
    assert low < one[0]["main/loss"] < high
    stored = yaml.safe_load(Path("one/config.yaml").read_text())
    assert stored["optimizer"]["name"] == load.load(FOLDER / f"{name}.yaml")[0].optimizer.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_foretells_the_job_and_tries_it(run):
    code, out, err = run(
        FOLDER / "akiba2017.yaml", "model.name=resnet18", "--rehearse", "1024x8", "--examples", NUM,
        "--examples-per-second", "178.8", "--gigabits", "112",
    )  # fmt: skip
    assert code == 0, out + err
    words = " ".join(out.split())
    assert "ranks: 1,024 on 128 hosts, 8 on each" in words
    assert "batch: 32,768, that is 32 examples per rank; 1,024 virtual workers of 32" in words
    assert "lr: 6.4 at the start, 6.4 at most (epoch 0), 0.0128 at the end" in words
    sent = 2 * 1023 / 1024 * 11_689_512 * 2 / 1e6
    assert f"{2 * sent:.2f} MB per rank and step, {sent:.2f} in 16 bits" in words
    assert "the rehearsal has passed" in words


@pytest.mark.slow
@pytest.mark.timeout(300)
@each(
    **{
        "words, trial, batch": [
            (["batch=64", "last_batch=drop"], "3x5@40", "batch: 15"),
            (["batch={virtual_workers: 4, per_worker: 8}", "last_batch=drop"], "20x4@40", "20 virtual workers of 4"),
            (["batch=64", "accumulate=2", "batch_norm.group=2", "ema=0.9"], "2x2@32", "batch: 4"),
        ]
    }
)
def test_a_trial_is_as_small_as_it_is_asked_for(run, words, trial, batch):
    """Also where it needs more made-up images than there are by default, and for batches without virtual workers."""
    asked = ["--rehearse", "4x2", "--examples", 1000, "--trial", trial, "--examples-per-second", 10]
    code, out, err = run(FOLDER / "sample.yaml", "model.name=resnet18", *words, *asked)
    assert code == 0, out + err
    words = " ".join(out.split())
    assert batch in words
    assert "the rehearsal has passed" in words


def test_traffic_of_a_ring():
    """Golden numbers for ResNet-50 in 16 bits."""
    found = [rehearsal.ring_bytes(p, 25_557_032 * 2) / 1e6 for p in (8, 1024)]
    assert found == pytest.approx([89.45, 102.13], abs=0.005)


def test_evaluation_counts_each_image_once_on_1024_ranks():
    """50,000 images: ChainerMN's equal shards would make 50,176 of them."""
    parts = [block_bounds(50_000, rank, 1024) for rank in range(1024)]
    assert sum(end - start for start, end in parts) == 50_000
    assert [end for _, end in parts[:-1]] == [start for start, _ in parts[1:]]
