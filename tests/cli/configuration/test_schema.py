"""Tests of dbrdist.cli.configuration.schema."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pydantic import ValidationError

from dbrdist.cli.configuration import schema, settings
from dbrdist.cli.configuration.load import check
from dbrdist.cli.configuration.schema import Config, number_at
from dbrdist.errors import ConfigError
from tests.cli.config_helpers import GOOD, config
from tests.cli.json_schema import is_valid
from tests.each import each


def test_numbers_by_dotted_keys():
    own = config(GOOD)
    assert number_at(own, "epochs") == 3.0 and number_at(own, "nothing") is None and number_at(own, "model") is None
    assert number_at(own, "reproducible") is None
    assert number_at((1, 2.5), "1") == 2.5 and number_at((1, 2.5), "2") is None and number_at((1,), "x") is None
    assert number_at({"a": {"b": 4}}, "a.b") == 4 and number_at({"a": 1}, "b") is None and number_at(3, "a") is None


BASE = {"model": "mlp", "data": "digits", "batch": 64, "epochs": 3}
TEXTS = [
    "x",
    "",
    "1",
    "1 epoch",
    " .5  epochs ",
    "0 epochs",
    "2.0 iterations",
    "1.5 iterations",
    "a:b",
    "gpu:1",
    "auto",
]
VALUES = [None, True, -1, 0.5, 2, [], [0.5, 2], {}, *TEXTS]
FEW = [None, True, -1, 0.5, 2, "x", [0.5, 2]]
# Settings that a component needs, to be tried with another one.
NEEDED = {
    "image_folder": {"root": "r"}, "cifar10": {"root": "r"}, "npz": {"train": "x"}, "random_crop": {"size": 8},
    "random_resized_crop": {"size": 8}, "center_crop": {"size": 8}, "center_resized_crop": {"size": 8},
    "resize": {"size": 8}, "normalize": {"mean": [0.5], "std": [0.5]}, "weight_decay": {"rate": 0.1},
    "decoupled_weight_decay": {"rate": 0.1}, "lasso": {"rate": 0.1}, "gradient_clipping": {"threshold": 1},
    "gradient_hard_clipping": {"lower_bound": -9, "upper_bound": 9}, "gradient_noise": {"eta": 0.1},
    "step": {"milestones": [1]}, "exponential": {"gamma": 0.5}, "piecewise_linear": {"points": [[0, 1], [1, 2]]},
}  # fmt: skip
# Where a component of a kind is written.
PLACES = {
    "model": ["model"], "data": ["data"], "loss": ["loss"], "optimizer": ["optimizer"], "metric": ["metrics", 0],
    "compression": ["compression"], "transform": ["transforms", "train", 0], "hook": ["optimizer", "hooks", 0],
    "schedule": ["optimizer", "schedule"],
}  # fmt: skip


def components():
    """Each name of a component with a configuration that has it, and its place there."""
    for tag, cls in settings.BY_TAG.items():
        kind = tag.strip("<>").split()[0]
        if kind not in PLACES or issubclass(cls, settings.Custom) or not hasattr(cls, "model_fields"):
            continue
        for name in get_args(cls.model_fields["name"].annotation):
            made = {"name": name, **NEEDED.get(name, {})}
            data = {**BASE, "transforms": {"train": []}, "optimizer": {"name": "sgd", "hooks": []}, "metrics": []}
            if kind == "transform":
                data |= {"transforms": {"train": [made]}, "data": {"name": "image_folder", "root": "r"}}
            elif kind == "hook":
                data["optimizer"] = {"name": "sgd", "hooks": [made]}
            elif name == "elu":
                data["optimizer"], place = "rmsprop_warmup", ["schedules", 0, "schedule"]
                yield name, cls, {**data, "schedules": [{"of": "optimizer.a_sgd", "schedule": made}]}, place
                continue
            elif kind == "schedule":
                data["optimizer"] = {"name": "sgd" if name != "own" else "adadelta", "schedule": made}
            else:
                data[{"metric": "metrics"}.get(kind, kind)] = [made] if kind == "metric" else made
            yield name, cls, data, PLACES[kind]


def with_entry(data, path, value):
    """A copy of the data with one entry replaced."""
    if not path:
        return value
    copied = list(data) if isinstance(data, list) else dict(data)
    copied[path[0]] = with_entry(copied[path[0]] if len(path) > 1 else None, path[1:], value)
    return copied


def judged(data):
    """Whether the command takes a configuration, and what it says."""
    try:
        return Config.model_validate(data), ""
    except ValidationError as error:
        return None, str(error)


# What a schema cannot say: that one key goes with another, that a file is there.
RELATIONS = (
    "needs|must be less than the period|smallest is larger|must be above lower_bound|is longer than the run|rise|"
    "one for each milestone|never reached|cannot be combined|does not work with|cannot be read|has its schedule|"
    "increasing: true|and threads do the same|are less than one step|own transforms|soft labels|sums over ranks|"
    "has a schedule already|expected the smallest ratio|expected the key of a number|adds gradients on GPUs"
)


def differences(data, path, values):
    for value in values:
        tried = with_entry(data, path, value)
        found, words = judged(tried)
        if (found is not None) != is_valid(tried, SCHEMA) and not re.search(RELATIONS, words):
            yield path, value, words or "the schema refuses it"


SCHEMA = Config.model_json_schema()


@pytest.mark.slow
def test_the_schema_takes_what_the_command_takes_of_a_run():
    found = []
    for key, field in Config.model_fields.items():
        if key == "extends":  # which is read before
            continue
        found += differences(BASE, [key], VALUES)
        section = field.annotation
        if isinstance(section, type) and issubclass(section, settings.Settings):
            for inner in section.model_fields:
                found += differences({**BASE, key: {}}, [key, inner], VALUES)
    for key, inner in (("ema", {"decay": 0.5}), ("ema", {}), ("stop", {"target": 1}), ("stop", {"patience": 2})):
        for name in (schema.Ema if key == "ema" else schema.Stop).model_fields:
            found += differences({**BASE, key: inner}, [key, name], VALUES)
    assert not found


@pytest.mark.slow
def test_the_schema_takes_what_the_command_takes_of_components():
    found, num_tried = [], 0
    for name, cls, data, place in components():
        assert judged(data)[0] is not None and is_valid(data, SCHEMA), name
        for spelling in (name.upper(), name.replace("_", ""), f" {name.replace('_', '-')}", f"{name}x", {}):
            found += differences(data, [*place, "name"], [spelling])
        for key in cls.model_fields:
            num_tried += 1
            found += differences(data, [*place, key], FEW)
        found += differences(data, [*place, "nothing"], [1])
    assert not found and num_tried > 150


def test_whole_numbers_that_are_written_as_floats_are_the_only_known_difference():
    """JSON Schema counts 64.0 as an integer, and cannot say otherwise; the command takes nothing for something else."""
    assert is_valid({**BASE, "batch": 64.0}, SCHEMA) and judged({**BASE, "batch": 64.0})[0] is None


def first_of(text):
    """The first mistake without its place; None where the configuration is fine."""
    try:
        check(text.encode(), "run.yaml")
    except ConfigError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    return None


CROP = "{{name: random_resized_crop, size: 8, {}}}"
SIZED = "transforms: {train: [{name: random_resized_crop, size: [[0, 8], [1, 16]]}]}"
PICTURES = "data: {name: image_folder, root: x}"


@each(
    **{
        "lines, words": [
            (["epochs: 1.0e-8"], None),
            (["epochs: 0.99e-8"], "epochs: 9.9e-09 epochs are less than one step"),
            (["batch: 2147483647"], None),
            (["batch: 2147483648"], "batch: must be at most 2.14748e+09, got 2147483648"),
            (["batch: {virtual_workers: 46341, per_worker: 46340}"], None),
            (
                ["batch: {virtual_workers: 65536, per_worker: 32768}"],
                "batch: 2,147,483,648 examples per step are more than 2,147,483,647",
            ),
            (["dtype: mixed16", "loss_scale: 65504"], None),
            (["dtype: mixed16", "loss_scale: 65505"], "loss_scale: mixed16 takes at most 65504, got 65505"),
            (["dtype: float16", "loss_scale: 65505"], "loss_scale: float16 takes at most 65504, got 65505"),
            (["loss_scale: 65505"], None),
            (["loss_scale: 3.1e38"], "loss_scale: float32 takes at most 3e+38, got 3.1e+38"),
            (["loss_scale: 2.9e38"], None),
            (["optimizer: {name: sgd, schedule: {name: cosine, warmup_epochs: 3}}"], None),
            (
                ["optimizer: {name: sgd, schedule: {name: cosine, warmup_epochs: 3.5}}"],
                "optimizer.schedule.warmup_epochs: a warm-up of 3.5 epochs is longer than the run of 3",
            ),
            (["optimizer: {name: sgd, schedule: {name: cosine, begin: 2.9}}"], None),
            (
                ["optimizer: {name: sgd, schedule: {name: cosine, begin: 3.0}}"],
                "optimizer.schedule.begin: epoch 3 is never reached: the run has 3 epochs",
            ),
            (["optimizer: {name: sgd, schedule: {name: step, milestones: [1, 2.9]}}"], None),
            (
                ["optimizer: {name: sgd, schedule: {name: step, milestones: [1, 3]}}"],
                "optimizer.schedule.milestones: epoch 3 is never reached: the run has 3 epochs",
            ),
            (
                ["schedules: [{of: loss.label_smoothing, schedule: {name: step, milestones: [4]}}]",
                 "loss: {name: softmax_cross_entropy, label_smoothing: 0.1}"],
                "schedules.0.schedule.milestones: epoch 4 is never reached: the run has 3 epochs",
            ),
            ([PICTURES, f"transforms: {{train: [{CROP.format('smallest: 0.5, largest: 0.5')}]}}"], None),
            (
                [PICTURES, f"transforms: {{train: [{CROP.format('smallest: 0.6, largest: 0.5')}]}}"],
                "transforms.train.0.smallest: smallest is larger than largest, 0.5",
            ),
            ([PICTURES, f"transforms: {{train: [{CROP.format('ratio: [1.5, 1.5]')}]}}"], None),
            (
                [PICTURES, f"transforms: {{train: [{CROP.format('ratio: [1.5, 1.4]')}]}}"],
                "transforms.train.0.ratio: expected the smallest ratio, then the largest",
            ),
            ([PICTURES, SIZED], None),
            (
                [PICTURES, SIZED, "last_batch: wrap"],
                "last_batch: wrap mixes two epochs in a batch, which transforms.train: the size of random_resized_crop "
                "does not allow; take short or drop",
            ),
            (["last_batch: wrap", "repeats: 1"], None),
            (
                ["last_batch: wrap", "repeats: 2"],
                "last_batch: wrap mixes two epochs in a batch, which repeats: 2 does not allow; take short or drop",
            ),
            (["evaluation: {every: 2 epochs, offset: 1.9}"], None),
            (
                ["evaluation: {every: 2 epochs, offset: 2}"],
                "evaluation.offset: must be less than the period, 2 epochs, got 2",
            ),
            (
                ["evaluation: {every: 1 epoch, offset: 2}"],
                "evaluation.offset: must be less than the period, 1 epoch, got 2",
            ),
            (["evaluation: {every: 20 iterations, offset: 3}"], None),
            (
                ["evaluation: {every: 20 iterations, offset: 3.5}"],
                "evaluation.offset: expected a whole number of iterations, got 3.5",
            ),
            (["local_steps: 1", "accumulate: 1", "batch: {virtual_workers: 2, per_worker: 4}"], None),
            (
                ["batch_norm: {group: 2}", "batch: {virtual_workers: 2, per_worker: 4}"],
                "batch_norm.group: virtual workers normalize their own batches; write `batch: N`",
            ),
            (["batch_norm: {group: 1}", "batch: {virtual_workers: 2, per_worker: 4}"], None),
            (["snapshot: {every: 0.5 hours or 0.25 seconds}"], None),
            (
                ["snapshot: {every: 0 hours}"],
                "snapshot.every: expected a period such as '1 epoch', '200 iterations', '30 minutes' or '1 epoch or 2 "
                "hours', got '0 hours'",
            ),
            (["threads: 2"], None),
            (["workers: 2"], None),
            (
                ["threads: 2", "workers: 2"],
                "threads: threads and workers do the same: threads for images, workers for transforms in Python",
            ),
            (
                ["reproducible: true"],
                "reproducible: sums over ranks depend on how many there are; write `batch: {virtual_workers: V, "
                "per_worker: b}`, and any number of ranks up to V gives the same bits",
            ),
            (
                ["reproducible: true", "device: gpu", "batch: {virtual_workers: 2, per_worker: 4}"],
                "reproducible: expected device: cpu, where sums have a fixed order, got gpu",
            ),
            (["communicator: pure_nccl", "device: gpu"], None),
            (
                ["communicator: pure_nccl"],
                "communicator: pure_nccl adds gradients on GPUs; set device: gpu, or communicator: auto",
            ),
            (
                ["updater: 'a:B'", "batch: {virtual_workers: 2, per_worker: 4}"],
                "updater: virtual workers need their own updater; leave out one of them",
            ),
            (
                ["schedules: [{of: optimizer.lr, schedule: constant}]"],
                "schedules.0.of: optimizer.lr has its schedule under optimizer.schedule",
            ),
            (
                ["optimizer: adam", "schedules: [{of: optimizer.alpha, schedule: constant}]"],
                "schedules.0.of: optimizer.alpha has its schedule under optimizer.schedule",
            ),
            (
                ["schedules: [{of: loss_scale, schedule: constant}]"],
                "schedules.0.of: loss_scale is auto; only a number can have a schedule",
            ),
            (["loss_scale: 2", "schedules: [{of: loss_scale, schedule: constant}]"], None),
            (
                ["schedules: [{of: epochs, schedule: constant}]"],
                "schedules.0.of: expected the key of a number of the optimizer, its hooks or the loss, such as "
                "optimizer.momentum or loss.label_smoothing, got 'epochs'",
            ),
            (
                ["schedules: [{of: optimizer.schedule.warmup_epochs, schedule: constant}]"],
                "schedules.0.of: expected the key of a number of the optimizer, its hooks or the loss, such as "
                "optimizer.momentum or loss.label_smoothing, got 'optimizer.schedule.warmup_epochs'",
            ),
            (
                ["optimizer: momentum_sgd", "schedules: [{of: optimizer.momentum, schedule: constant}, "
                 "{of: optimizer.momentum, schedule: constant}]"],
                "schedules.1.of: optimizer.momentum has a schedule already",
            ),
        ]
    }
)  # fmt: skip
def test_both_sides_of_what_cannot_be(lines, words):
    given = {line.partition(":")[0] for line in lines}
    base = [line for line in GOOD.splitlines() if line.partition(":")[0] not in given]
    found = first_of("\n".join([*base, *lines]))
    assert found == words
