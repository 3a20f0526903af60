"""Tests of dbrdist.cli.configuration.load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from pydantic import BaseModel

import dbrdist
from dbrdist.cli.configuration.load import check, dump, load
from dbrdist.cli.configuration.schema import Config, interval
from dbrdist.cli.configuration.settings import BY_TAG, Settings
from dbrdist.errors import ConfigError, UsageWarning
from tests.cli.config_helpers import GOOD, config, configured, errors
from tests.each import each


def test_a_batch_is_a_number_or_a_mapping():
    read = config(GOOD)
    assert (read.batch_size, read.virtual_workers, read.reproducible) == (64, None, False)
    text = GOOD.replace("64", "{virtual_workers: 8, per_worker: 32}") + "reproducible: true\n"
    read = config(text)
    assert (read.batch_size, read.virtual_workers, read.reproducible) == (256, 8, True)
    assert config(dump(read)) == read
    assert config(text, "batch.virtual_workers=2").batch_size == 64


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("0", "run.yaml:3:8: batch: must be at least 1, got 0"),
        ("[3]", "run.yaml:3:8: batch: expected a whole number, got [3]"),
        ("{virtual_workers: 8}", "run.yaml:3:8: batch.per_worker: is required and missing"),
        ("{virtual_workers: 0, per_worker: 1}", "run.yaml:3:26: batch.virtual_workers: must be at least 1, got 0"),
        (
            "{virtual_workers: 8, per_workers: 1, per_worker: 1}",
            "run.yaml:3:29: batch.per_workers: unknown key, did you mean 'per_worker'?",
        ),
        (
            "{virtual_workers: 100000, per_worker: 100000}",
            "run.yaml:3:8: batch: 10,000,000,000 examples per step are more than 2,147,483,647",
        ),
    ],
)
def test_mistakes_in_a_batch(batch, expected):
    assert errors(GOOD.replace("64", batch)) == [expected]


WORKERS = "batch={virtual_workers: 2, per_worker: 2}"


@each(
    words=[
        ["zero=3"],
        ["zero=true"],
        ["compression.rank=2"],
        ["compression={name: power_sgd, rank: 0}"],
        ["compression={name: top_k, fraction: 0}"],
        ["compression={name: top_k, fraction: 1.5}"],
        ["compression=x:y"],
        ["accumulate=0"],
        ["local_steps=0"],
        ["double_buffering=1"],
        ["parameter_audit=30 minutes"],
        ["communicator=dummy"],
        ["communicator=pure_nccl"],
        ["communicator=two_dimensinal"],
        ["zero=1", "compression=top_k"],
        ["zero=2", "local_steps=2"],
        ["compression=power_sgd", "double_buffering=true"],
        ["local_steps=2", "double_buffering=true"],
        ["accumulate=2", "local_steps=2"],
        ["zero=1", "compression=top_k", "local_steps=2", "double_buffering=true", "accumulate=3"],
        ["dtype=float16", "double_buffering=true"],
        ["dtype=mixed16", "compression=top_k"],
        ["local_steps=2", "parameter_audit=1 epoch"],
        *([WORKERS, word] for word in ("zero=1", "compression=top_k", "accumulate=2", "local_steps=2")),
        [WORKERS, "double_buffering=true"],
    ]
)
def test_updates_by_several_ranks_that_cannot_be(words):
    found = errors(GOOD, *words)
    assert len(found) == 1
    word = next(word for word in words if found[0].startswith(f"command line {word!r}: "))
    assert found[0].removeprefix(f"command line {word!r}: ").startswith(word.split("=")[0].split(".")[0])


@pytest.mark.slow
@each(
    words=[
        ["zero=2", "accumulate=2", "parameter_audit=10 iterations", "dtype=float16"],
        ["compression=TopK", "accumulate=2", "dtype=float16", "loss_scale=8"],
        ["compression={name: PowerSGD, rank: 4}", "dtype=bfloat16"],
        ["double_buffering=true", "accumulate=2", "parameter_audit=1 epoch"],
        [WORKERS, "parameter_audit=1 epoch"],
        ["communicator=pure_nccl", "device=gpu"],
        *([f"communicator={name}"] for name in ("hierarchical", "two_dimensional", "single_node", "non_cuda_aware")),
    ]
)
def test_updates_by_several_ranks_that_can_be(words):
    read = config(GOOD, *words)
    assert config(dump(read)) == read


def test_two_ways_of_updating_are_both_named():
    (found,) = errors(GOOD + "zero: 1\nlocal_steps: 4\n")
    assert found == "run.yaml:6:14: local_steps: zero: 1 and local_steps: 4 cannot be combined; use only one of them"


def test_what_reproducible_needs():
    (found,) = errors(GOOD + "reproducible: true\n")
    assert found.startswith(
        "run.yaml:5:15: reproducible: sums over ranks depend on how many there are; write `batch: {"
    )
    (found,) = errors(GOOD.replace("64", "{virtual_workers: 2, per_worker: 2}") + "reproducible: true\ndevice: gpu\n")
    assert found == "run.yaml:5:15: reproducible: expected device: cpu, where sums have a fixed order, got gpu"


def test_a_bare_name_is_a_component():
    read = config(GOOD + "optimizer: {name: adam, alpha: 1e-3, hooks: [{name: weight_decay, rate: 1e-4}]}\n")
    assert read.model.units == (100, 100)
    assert read.optimizer.alpha == 0.001
    assert read.optimizer.hooks[0].rate == 1e-4
    assert read.seed == 0


def test_every_mistake_is_listed_once_in_the_order_of_the_file():
    text = """\
model: lent
data:
  name: image_folder
  roott: x
batch: 3.5
batch: 4
epochs: yes
optimizer:
  name: momentum_sgd
  momentun: 0.9
  lr: fast
  hooks: [{name: weight_decay, rate: -1}]
dtype: float23
log: {every: 3}
snapshot: 3
snapshots: 3
"""
    found = errors(text, "data.root.x=[")
    assert [line.split(": ")[0] for line in found] == [
        "run.yaml:1:8",
        "run.yaml:3:3",
        "run.yaml:4:3",
        "run.yaml:5:8",
        "run.yaml:6:1",
        "run.yaml:7:9",
        "run.yaml:10:3",
        "run.yaml:11:7",
        "run.yaml:12:38",
        "run.yaml:13:8",
        "run.yaml:14:14",
        "run.yaml:15:11",
        "run.yaml:16:1",
        "command line 'data.root.x=['",
    ]
    assert "'lent', did you mean 'lenet'?" in found[0]
    assert "data.root: is required and missing" in found[1]
    assert "data.roott: unknown key, did you mean 'root'?" in found[2]
    assert "batch: expected a whole number, got 3.5" in found[3]
    assert "duplicate key 'batch', first given at run.yaml:5:1" in found[4]
    assert "epochs: expected a number, got 'yes'" in found[5]
    assert "optimizer.momentun: unknown key, did you mean 'momentum'?" in found[6]
    assert "optimizer.hooks.0.rate: must be at least 0" in found[8]
    assert "got 'float23', did you mean 'float32'?" in found[9]
    assert "snapshots: unknown key, did you mean 'snapshot'?" in found[12]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs: 0", "epochs: must be greater than 0, got 0"),
        ("epochs: .inf", "epochs: expected a finite number"),
        ("epochs: true", "epochs: expected a number, got True"),
        ("epochs: '3'", "epochs: expected a number, got '3'"),
        ("epochs:", "epochs: expected a number, got nothing"),
        ("epochs: [1]", "epochs: expected a number, got [1]"),
        ("epochs: 3\nout: 7", "out: expected text; put it in quotes"),
        ("epochs: 3\nout: ''", "out: expected some text"),
        ("epochs: 3\ndevice: gup", "device: expected cpu, gpu or gpu:N, got 'gup'"),
        ("epochs: 3\nloss_scale: on", "loss_scale: expected auto or a number above 0, got 'on'"),
        ("epochs: 3\nloss_scale: 0", "loss_scale: expected auto or a number above 0, got 0"),
        ("epochs: 3\ndtype: float16\nloss_scale: 1e5", "loss_scale: float16 takes at most 65504, got 100000"),
        (
            "epochs: 3\noptimizer: {hooks: [{rate: 1}]}",
            "optimizer.hooks.0: `name` is required and missing: decoupled_weight_d",
        ),
        ("epochs: 3\noptimizer: {name: 3}", "optimizer.name: expected the name of an optimizer: adabound"),
        ("epochs: 3\ntransforms: {train: random_flip}", "transforms.train: expected a list, got 'random_flip'"),
        ("epochs: 3\ntransforms: {test: [random_flip]}", "transforms.test.0: random_flip is random"),
        ("epochs: 3\noptimizer: {name: sgd, schedule: {name: cosine, warmup_epochs: 5}}", "longer than the run of 3"),
        ("epochs: 3\noptimizer: {name: sgd, schedule: {name: step, milestones: [1, 3]}}", "epoch 3 is never reached"),
        ("epochs: 3\noptimizer: {name: sgd, schedule: {name: step, milestones: [2, 1]}}", "the epochs must rise"),
        ("epochs: 3\noptimizer: {name: sgd, schedule: step}", "schedule.milestones: is required and missing"),
        ("epochs: 3\nlog: {every: 0 epochs}", "log.every: expected a period such as '1 epoch'"),
        ("epochs: 3\nlog: {every: 0.5 iterations}", "log.every: expected a period such as '1 epoch'"),
    ],
)
def test_one_mistake_one_sentence(line, words):
    found = errors(f"model: mlp\ndata: digits\nbatch: 64\n{line}\n")
    assert len(found) == 1
    assert words in found[0]


def test_a_required_key_that_is_missing():
    assert errors("model: mlp\ndata: digits\nbatch: 4\n") == ["run.yaml:1:1: epochs: is required and missing"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "~\n"])
def test_an_empty_file_names_what_is_required(text):
    found = errors(text)
    assert len(found) == 4
    assert all("is required and missing" in line for line in found)


@pytest.mark.parametrize("text", ["- 1\n", "just words\n"])
def test_a_file_that_is_not_a_mapping(text):
    assert errors(text) == ["run.yaml:1:1: expected `key: value` lines"]


def test_a_file_that_is_not_text():
    with pytest.raises(ConfigError, match=r"run.yaml:2:1: the file is not UTF-8 text"):
        check(b"a: 1\nb: \xff\n", "run.yaml")


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")


# ---- overrides ----------------------------------------------------------------------------------------------------
def test_overrides_reach_everywhere():
    text = GOOD + "optimizer: {name: sgd, hooks: [{name: weight_decay, rate: 1}]}\n"
    read = config(
        text,
        "epochs=1e1",
        "model.units=[3, 4]",
        "optimizer.hooks.0.rate=1e-4",
        "snapshot.keep=5",
        "out=2026",
        "data=my.data:make",
        "data.args.deep.er=on",
    )
    assert read.epochs == 10
    assert read.model.units == (3, 4)
    assert read.optimizer.hooks[0].rate == 1e-4
    assert read.snapshot.keep == 5
    assert read.out == "2026"
    assert read.data.args == {"deep": {"er": "on"}}


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    """In `out=~/runs` a shell leaves it alone."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home/base.yaml").write_text("epochs: 7\n")
    (folder / "tilde.yaml").write_text(
        "extends: ~/base.yaml\nmodel: mlp\ndata: {name: image_folder, root: ~/images}\nbatch: 1\ninit_from: ~/w.npz\n"
    )
    read = load("tilde.yaml", ["out=~/runs"])[0]
    home = str(folder / "home")
    assert (read.epochs, read.out, read.init_from.path) == (7, f"{home}/runs", f"{home}/w.npz")
    assert read.data.root == f"{home}/images"
    assert load("run.yaml", ["out=./~/runs"])[0].out == "./~/runs"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("epoch=3", "command line 'epoch=3': epoch: unknown key, did you mean 'epochs'?"),
        ("optimiser.lr=3", "command line 'optimiser.lr=3': optimiser: unknown key, did you mean 'optimizer'?"),
        ("epochs=three", "command line 'epochs=three': epochs: expected a number, got 'three'"),
        ("epochs", "command line 'epochs': expected key=value"),
        ("=3", "command line '=3': expected key=value"),
        ("batch.x=3", "command line 'batch.x=3': batch is a value and has no entry 'x'"),
        ("model.units=[1", "command line 'model.units=[1': expected ',' or ']'"),
        ("model.units=[0]", "command line 'model.units=[0]': model.units.0: must be at least 1, got 0"),
        ("transforms.train.0=x", "transforms.train: expected a list"),
    ],
)
def test_a_wrong_override_is_named(override, words):
    found = errors(GOOD, override)
    assert len(found) == 1
    assert words in found[0]


def test_an_override_that_another_one_replaces_is_said_and_forgotten():
    with pytest.warns(UsageWarning, match=r"^command line 'optimizer.lr=0.2': this .*, for 'optimizer=sgd' behind it"):
        assert checked("", "optimizer.lr=0.2", "optimizer=sgd").optimizer.lr == 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked("", "optimizer=sgd", "batch=8", "optimizer.lr=0.2", "batch=16").optimizer.lr == 0.2
        words = ["data.root=123", "data={name: image_folder, root: 5}"]  # which is not what the first one typed
        with pytest.raises(ConfigError, match=r"^command line 'data=.*expected text.*, got 5$"):
            checked("", *words)


def test_a_list_is_indexed_by_number():
    text = GOOD + "transforms: {train: [random_flip]}\n"
    assert (
        "transforms.train is a list of 1; number its items from 0, got '1'"
        in errors(text, "transforms.train.1=random_flip")[0]
    )


# ---- the models ----------------------------------------------------------------------------------------------------
def all_models():
    """Those of the package, whatever other tests derive."""
    todo, seen = [Settings], []
    while todo:
        cls = todo.pop()
        seen.append(cls)
        todo += cls.__subclasses__()
    return [cls for cls in seen if cls is not Settings and cls.__module__.startswith("dbrdist.")]


@each(model=all_models())
def test_each_field_has_one_sentence(model):
    assert model.__doc__
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name} says nothing"
        assert field.description.endswith("."), f"{model.__name__}.{name} is not a sentence"


def test_the_keys_of_a_run():
    """A new key is a decision: it is added here too."""
    assert list(Config.model_fields) == [
        *("extends", "model", "data", "loss", "transforms", "optimizer", "schedules", "ema", "updater", "init_from"),
        *("metrics", "extensions"),
        *("batch", "last_batch", "repeats", "reproducible", "epochs", "iterations", "seed"),
        *("communicator", "zero", "compression", "gradient_dtype", "batch_norm", "stop", "lr_finder", "batch_finder"),
        *("accumulate", "local_steps", "double_buffering", "parameter_audit"),
        *(
            "dtype",
            "float32_products",
            "loss_scale",
            "device",
            "deterministic",
            "graph",
            "fused_convolutions",
            "workers",
            "threads",
            "audit",
            "evaluation",
            "snapshot",
            "log",
            "out",
        ),
    ]


def test_gradients_on_a_gpu_may_be_added_in_one_order():
    assert not config().deterministic
    assert config(GOOD + "deterministic: true\n").deterministic


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        config().batch = 3


def test_a_dumped_configuration_reads_back_the_same():
    text = GOOD + "optimizer: {name: adam, alpha: 1e-5, schedule: {name: step, milestones: [1, 2.5]}}\n"
    text += "transforms: {train: [{name: normalize, mean: [1], std: [2]}, 'a.b:c']}\nout: 'yes'\n"
    first = config(text)
    written = dump(first)
    assert config(written) == first
    assert next(iter(yaml.safe_load(written)["optimizer"])) == "name"


@pytest.mark.slow
def test_the_schema_knows_each_component():
    schema = Config.model_json_schema()
    for cls in BY_TAG.values():
        assert cls.__name__ in schema["$defs"]
    assert (
        schema["properties"]["seed"]["description"]
        == "Start of all chance: initial values, order, augmentation, dropout."
    )


def test_tags_are_not_keys():
    """A tag may stand in pydantic's locations only; a field of that name would be lost from the messages."""
    fields = {name for cls in BY_TAG.values() if issubclass(cls, BaseModel) for name in cls.model_fields}
    assert not fields & set(BY_TAG)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("1 epoch", (1, "epoch")), ("0.5 epochs", (0.5, "epoch")), ("200 iterations", (200, "iteration"))],
)
def test_periods(words, expected):
    read = config(GOOD + f"log: {{every: {words}}}\n")
    assert interval(read.log.every) == expected
    assert isinstance(interval(read.log.every)[0], type(expected[0]))


@pytest.mark.parametrize(("number", "is_taken"), [(10, True), (11, False)])
def test_ten_files_may_extend_one_another(tmp_path, number, is_taken):
    for k in range(number):
        text = f"extends: {k + 1}.yaml\n" if k < number - 1 else GOOD
        (tmp_path / f"{k}.yaml").write_text(text)
    if is_taken:
        assert len(load(tmp_path / "0.yaml")[1].files) == 10
    else:
        with pytest.raises(ConfigError, match="expected at most 10 files that extend one another"):
            load(tmp_path / "0.yaml")


def test_an_unknown_key_is_told_one_that_is_near_or_all():
    (near,) = errors(GOOD, "bach=3")
    assert near == "command line 'bach=3': bach: unknown key, did you mean 'batch'?"
    (far,) = errors(GOOD, "snapshot.zzz=3")
    assert (
        far
        == "command line 'snapshot.zzz=3': snapshot.zzz: unknown key; known here: every, keep, best, mode, background"
    )
    (choice,) = errors(GOOD, "dtype=zzz")
    assert "known here" not in choice


def test_what_is_no_regular_file_is_refused(run, folder):
    os.mkfifo("pipe")
    (folder / "own.yaml").write_text("extends: pipe\nbatch: 3\n")
    assert run("run.yaml")[0] == 0
    for name in ("log.jsonl", "log.txt", "model.json", "config.yaml", "summary.json"):
        shutil.copytree("result", f"of {name}")
        os.remove(f"of {name}/{name}")
        os.mkfifo(f"of {name}/{name}")
    for words in (
        ["pipe"],
        ["/dev/null"],
        ["own.yaml"],
        ["run.yaml", "init_from=pipe", "out=other"],
        ["run.yaml", "init_from=/dev/zero", "out=other"],
        ["run.yaml", "data={name: npz, train: pipe}", "out=other"],
        *(
            ["run.yaml", f"out=of {name}", "--resume", "iterations=5"]
            for name in ("log.jsonl", "log.txt", "config.yaml")
        ),
        ["--report", "of log.jsonl"],
        ["--evaluate", "of config.yaml"],
    ):
        code, _, err = run(*words)
        assert code == 2 and "expected a regular file, it is a" in err and "Traceback" not in err, (words, err)
    assert run("run.yaml", "out=of summary.json", "--resume", "iterations=5")[0] == 0
    assert run("run.yaml", "out=of model.json", "--resume", "iterations=5")[0] == 0


@pytest.mark.programs
def test_a_configuration_may_come_from_a_pipe(folder):
    words = f"cat run.yaml | {sys.executable} -m dbrdist.cli.train /dev/stdin --dry-run"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "momentum_sgd" in done.stdout, done.stderr


def test_names_that_are_not_utf_8(run):
    for part in ("train", "test"):
        for k, name in enumerate((b"cat", b"d\xf6g")):
            folder = os.path.join(b"photos", part.encode(), name)
            os.makedirs(folder)
            for i in range(3):
                with open(os.path.join(folder, b"\xff%d.png" % i), "wb") as file:
                    Image.fromarray(np.full((8, 8, 3), 99 * k + i, np.uint8)).save(file, "png")
    bad = os.fsdecode(b"photos/train/cat/\xff broken.png")
    Path(bad).write_bytes(b"no image")
    config = os.fsdecode(b"run\xff.yaml")
    os.rename("run.yaml", config)
    words = [config, "data={name: image_folder, root: photos, corrupt: skip}", "model=mlp", "transforms.train=[]"]
    code, out, err = run(*words, "batch=2")
    assert code == 0, err
    assert "1 corrupt training example left out" in out and "could not be written" not in out
    assert "run\\udcff.yaml" in Path("result/report/index.html").read_text()
    assert json.loads(Path("result/summary.json").read_text())["num_skipped_examples"] == 1
    code, out, err = run("--predict", "result", os.fsdecode(b"photos/test/d\xf6g/\xff0.png"))
    assert code == 0, err


BASE = "model: mlp\ndata: digits\nbatch: 50\nepochs: 1\n"


def checked(text="", *overrides):
    return check((BASE + text).encode(), "run.yaml", overrides)[0]


def test_the_learning_rate_by_either_name():
    assert checked("", "optimizer=adam", "optimizer.lr=0.5").optimizer.alpha == 0.5
    assert checked("optimizer: {name: sgd, alpha: 0.5}").optimizer.lr == 0.5
    with pytest.raises(dbrdist.errors.ConfigError, match=r"optimizer.lr: unknown key"):
        checked("optimizer: {name: adam, lr: 0.5, alpha: 0.2}")


def test_defaults_reach_deep():
    made = checked("", "loss.label_smoothing=0.1", "optimizer.momentum=0.5", "optimizer.schedule.warmup_epochs=0.5")
    assert (made.loss.name, made.loss.label_smoothing) == ("softmax_cross_entropy", 0.1)
    assert (made.optimizer.name, made.optimizer.momentum) == ("momentum_sgd", 0.5)
    assert (made.optimizer.schedule.name, made.optimizer.schedule.warmup_epochs) == ("constant", 0.5)


REFUSED = {
    "{name: random_crop, size: 0}": "expected a size of at least 1, or pairs [epoch, size] from epoch 0 on",
    "{name: random_crop, size: [[1, 5]]}": "pairs [epoch, size] from epoch 0 on",
    "{name: random_crop, size: [[0, 5], [0, 6]]}": "pairs [epoch, size] from epoch 0 on",
    "{name: random_crop, size: [[0, 5], [1]]}": "pairs [epoch, size] from epoch 0 on",
    "{name: random_crop, size: [[0, 5], [1.5, 6]]}": "pairs [epoch, size] from epoch 0 on",
    "{name: resize, size: true}": "expected a size of at least 1",
    "{name: resize, size: 5, method: lanczos}": "method: expected 'linear', 'area', 'bilinear' or 'bicubic'",
    "{name: random_resized_crop, size: 5, smallest: 0.5, largest: 0.2}": "smallest is larger than largest, 0.2",
    "{name: random_resized_crop, size: 5, ratio: [2, 1]}": "expected the smallest ratio, then the largest",
    "{name: color_jitter, hue: 0.6}": "hue: must be at most 0.5, got 0.6",
    "{name: color_jitter, brightness: -1}": "brightness: must be at least 0, got -1",
    "{name: pca_lighting, std: -1}": "std: must be at least 0",
    "{name: random_erasing, p: 1.5}": "p: must be at most 1, got 1.5",
    "{name: random_erasing, value: 256}": "value",
    "{name: random_erasing, value: random}": "value",
    "{name: rand_augment, magnitude: 31}": "magnitude: must be at most 30, got 31",
    "{name: rand_augment, num_ops: 0}": "num_ops: must be at least 1, got 0",
    "{name: mixup, alpha: 0}": "alpha: must be greater than 0, got 0",
    "{name: cutmix, p: -0.5}": "p: must be at least 0, got -0.5",
    "{name: cut_mux}": "did you mean 'cutmix'?",
}


@pytest.mark.parametrize("transform", REFUSED)
def test_bad_settings_of_transforms_are_refused(transform):
    with pytest.raises(dbrdist.errors.ConfigError) as error:
        configured(f"transforms: {{train: [{transform}]}}")
    assert REFUSED[transform] in str(error.value)
    assert str(error.value).startswith("run.yaml:3:")


@pytest.mark.parametrize(
    "lines_, words",
    [
        (["transforms: {test: [{name: mixup}]}"], "mixup is random, and evaluations must not be"),
        (["transforms: {test: [{name: color_jitter}]}"], "color_jitter is random"),
        (["transforms: {test: [{name: resize, size: [[0, 5]]}]}"], "sizes by epoch are for training"),
        (
            ["transforms: {train: [mixup]}", "loss: mean_squared_error"],
            "makes soft labels, which loss mean_sq",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(lines_, words):
    with pytest.raises(dbrdist.errors.ConfigError, match=words):
        configured(*lines_)


@each(
    **{
        "line, words": [
            ("dtype: float23", "'float23', did you mean 'float32'?"),
            ("dtype: zzz", "'zzz'"),
            ("dtype: 3", "3"),
            ("model: zzz", "'zzz'"),
        ]
    }
)
def test_a_value_that_is_near_none_ends_the_sentence(line, words):
    assert any(found.endswith(f"got {words}") for found in errors(f"data: digits\nbatch: 64\nepochs: 3\n{line}\n"))
