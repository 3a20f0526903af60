"""Tests of dbrdist.cli.builders.build."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Union, get_args, get_origin

import ml_dtypes
import numpy as np
import pytest
from pydantic import BaseModel

import dbrdist
from dbrdist import datasets, optimizers
from dbrdist.cli.builders import build, build_updates
from dbrdist.cli.configuration import updates
from dbrdist.cli.configuration.schema import Config
from dbrdist.comm import create_communicator
from dbrdist.comm.run.parameter_audit import ParameterAudit
from dbrdist.core.array import random
from dbrdist.datasets.image import transforms as T
from dbrdist.datasets.loading.base import get_batch
from dbrdist.errors import ConfigError
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import lines
from tests.cli.config_helpers import configured
from tests.each import each
from tests.warm import ROOT


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_floating_numbers_are_cast_and_others_are_not(dtype):
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    convert = build.converter(dtype)
    kinds = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.int64, bool]
    for kind in kinds:
        values = [np.array([1, 0], kind) for _ in range(3)]
        after = wanted if kind in kinds[:4] else np.dtype(kind)
        alone, pair, named = convert(values), convert([(v, 5) for v in values]), convert([{"x": v} for v in values])
        for array in (alone, pair[0], named["x"]):
            assert array.dtype == after and array.tolist() == [[1, 0]] * 3
        assert pair[1].tolist() == [5] * 3 and pair[1].dtype.kind == "i"


@each(**{"labels, num": [([0, 0], 1), ([-1, 0], 1), ([2, -1, 0], 3), ([[0], [1]], None), ([0.0, 1.0], None)]})
def test_classes_are_counted_from_0(labels, num):
    assert build._classes(SimpleNamespace(columns=(None, np.array(labels)))) == num


@each(**{"labels, words": [([-1, -1], "expected labels from 0"), ([], "the training set is empty")]})
def test_labels_that_name_no_class_are_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        build._classes(SimpleNamespace(columns=(None, np.array(labels, int))))


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 12, 10, 3)).astype(np.uint8)


def model_of(settings):
    config, origin = configured(f"model: {settings}")
    made = build.model(config, origin, build.model_recipe(config, origin, 10))
    with dbrdist.using_config("train", False):
        made(np.zeros((1, 3, 16, 16), np.float32))
    return made


def test_models():
    mlp = model_of({"name": "mlp", "units": [7, 5], "dropout": 0.25, "num_classes": 3})
    assert [link.W.shape[0] for link in mlp] == [7, 5, 3]
    assert mlp.dropout == 0.25
    lenet = model_of({"name": "lenet", "channels": [3, 5], "units": 7, "dropout": 0.25, "num_classes": 4})
    assert [p.shape[0] for p in (lenet.conv1.W, lenet.conv2.W, lenet.fc1.W, lenet.fc2.W)] == [3, 5, 7, 4]
    assert lenet.dropout == 0.25
    assert [p.shape for p in model_of("mlp").params()][-1] == (10,)  # the data's classes where none are given


@pytest.mark.slow
@pytest.mark.parametrize("name, blocks", [("resnet20", 9), ("resnet56", 27)])
def test_residual_networks(name, blocks):
    for zero_gamma in (True, False):
        made = model_of({"name": name, "num_classes": 3, "zero_gamma": zero_gamma})
        zeros = [path for path, p in made.namedparams() if path.endswith("gamma") and not p.array.any()]
        assert len(zeros) == (blocks if zero_gamma else 0)
        assert [p.shape for p in made.params()][-1] == (3,)


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_large_residual_networks(depth):
    """25 million parameters take seconds: the recipe, whose arguments test_resnet.py tests, is enough."""
    own = {"variant": "d", "blur_pooling": "all", "stochastic_depth": 0.25, "log_constant_bias": True}
    own |= {"fan": "fan_in", "uniform_gamma": True}
    args = {"zero_gamma": True, **own, "num_classes": 3}
    if depth >= 50:
        args = {"stride_in_3x3": False, **args}
    config, origin = configured(f"model: { ({'name': f'resnet{depth}', **args}) }")
    assert build.model_recipe(config, origin, 10) == {"callable": f"dbrdist.models:ResNet{depth}", "args": args}
    assert set(args) <= set(inspect.signature(dbrdist.models.ResNet).parameters)


@pytest.fixture
def npz(tmp_path):
    """Two .npz files of images (C, H, W)."""
    for part, size in (("a", 6), ("b", 3)):
        np.savez(tmp_path / f"{part}.npz", x=PIXELS[:size].transpose(0, 3, 1, 2), y=np.arange(size) % 3)
    return tmp_path


def examples(dataset):
    return [get_batch(dataset, np.array([i]), 0, 0, [])[0] for i in range(len(dataset))]


def transformed(npz, transform, part):
    config, origin = configured(
        f"data: {{name: npz, train: {npz}/a.npz, test: {npz}/b.npz}}", "transforms:", f"  {part}: [{transform}]"
    )
    data = build.data(config, origin)
    return [np.moveaxis(np.asarray(x), 0, -1) for x, _ in examples(getattr(data, part))]


def directly(transform, num):
    return [transform((x, 0), random.generator(0, "augment", 0, i))[0] for i, x in enumerate(PIXELS[:num])]


TRANSFORMS = {
    "random_crop": ({"size": 11, "padding": 3}, lambda: T.RandomCrop(11, 3)),
    "random_resized_crop": (
        {"size": 5, "smallest": 0.5, "largest": 0.75, "ratio": [0.5, 2.0], "method": "area"},
        lambda: T.RandomResizedCrop(5, (0.5, 0.75), (0.5, 2.0), "area"),
    ),
    "random_flip": ({}, lambda: T.RandomHorizontalFlip(0.5)),
    "center_crop": ({"size": 7}, lambda: T.CenterCrop(7)),
    "center_resized_crop": ({"size": 7, "ratio": 0.5, "method": "area"}, lambda: T.CenterResizedCrop(7, 0.5, "area")),
    "resize": ({"size": 6, "method": "area"}, lambda: T.Resize(6, "area")),
    "random color_jitter": (
        {"brightness": 0.1, "contrast": 0.2, "saturation": 0.3, "hue": 0.4},
        lambda: datasets.ColorJitter(0.1, 0.2, 0.3, 0.4),
    ),
    "random pca_lighting": ({"std": 0.7}, lambda: datasets.PCALighting(0.7)),
    "random_erasing": (
        {"p": 0.8, "smallest": 0.1, "largest": 0.4, "value": 9},
        lambda: datasets.RandomErasing(0.8, (0.1, 0.4), value=9),
    ),
    "random rand_augment": (
        {"num_ops": 3, "magnitude": 7.0, "std": 0.5, "increasing": True, "p": 0.75, "fill": [124, 116, 104]},
        lambda: datasets.RandAugment(3, 7, (124, 116, 104), std=0.5, increasing=True, p=0.75),
    ),
    "random trivial_augment": ({"fill": [1, 2, 3]}, lambda: datasets.TrivialAugment((1, 2, 3))),
    "normalize": ({"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.25, 0.2], "scale": 100.0}, None),
}


@pytest.mark.parametrize(
    "name, part, num",
    [*((n, "train", 6) for n in TRANSFORMS), *((n, "test", 3) for n in TRANSFORMS if not n.startswith("random"))],
)
def test_transforms(npz, name, part, num):
    fields, make = TRANSFORMS[name]
    seen = transformed(npz, {"name": name.removeprefix("random "), **fields}, part)
    if make is None:
        expected = [(x / 100 - np.array(fields["mean"])) / np.array(fields["std"]) for x in PIXELS[:num]]
    else:
        expected = directly(make(), num)
    for a, b in zip(seen, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["random_crop", "random_resized_crop", "resize"])
def test_sizes_by_epoch(npz, name):
    config, origin = configured(
        f"data: {{name: npz, train: {npz}/a.npz}}", f"transforms: {{train: [{{name: {name}, size: [[0, 5], [2, 7]]}}]}}"
    )
    train = build.data(config, origin).train
    assert [min(train.example_at(0, 0, epoch)[0].shape[1:]) for epoch in range(4)] == [5, 5, 7, 7]


@pytest.mark.parametrize("name, mixing", [("mixup", datasets.Mixup), ("cutmix", datasets.CutMix)])
def test_mixings(npz, name, mixing):
    config, origin = configured(
        f"data: {{name: npz, train: {npz}/a.npz}}",
        "model: {name: mlp, num_classes: 5}",
        f"transforms: {{train: [{{name: {name}, alpha: 0.7, p: 0.6, per_batch: true}}, {{name: resize, size: 6}}]}}",
    )
    made = build.data(config, origin)
    plain = datasets.AugmentedDataset(
        datasets.NpzDataset(npz / "a.npz"),
        T.Compose([build._ToHWC(), T.Resize(6), build._ToCHW()]),
    )
    expected = datasets.MixedDataset(plain, [mixing(0.7, 0.6)], 5, 4)
    for i in range(6):
        for a, b in zip(made.train.example_at(i, 3, 1), expected.example_at(i, 3, 1), strict=True):
            np.testing.assert_array_equal(a, b)


def test_mixing_needs_the_number_of_classes(monkeypatch):
    monkeypatch.setitem(sys.modules, "four_images", SimpleNamespace(datasets=four_images))  # by whatever name this has
    config, origin = configured("data: {name: 'four_images:datasets'}", "transforms: {train: [mixup]}")
    for names, first, at in (("[mixup]", "mixup", 0), ("[{name: resize, size: 4}, cutmix, mixup]", "cutmix", 1)):
        config, origin = configured("data: {name: 'four_images:datasets'}", f"transforms: {{train: {names}}}")
        with pytest.raises(dbrdist.errors.ConfigError) as caught:
            build.data(config, origin)
        words = f"{first} needs the number of classes; give your training data an attribute num_classes"
        assert str(caught.value) == (f"{origin.where(('transforms', 'train', at))}: transforms.train.{at}: {words}")


def four_images():
    return [(np.zeros((3, 4, 4), np.float32), 0)] * 4, None


def test_npz(npz):
    config, origin = configured(f"data: {{name: npz, train: {npz}/b.npz, test: {npz}/a.npz}}")
    made = build.data(config, origin)
    assert (len(made.train), len(made.test), made.num_classes) == (3, 6, 3)
    config, origin = configured(f"data: {{name: npz, train: {npz}/b.npz}}")
    assert build.data(config, origin).test is None


@pytest.fixture
def folders(tmp_path):
    """Class folders of PNG images, as fine as they come."""
    image = pytest.importorskip("PIL.Image")
    for part, num in (("learn", 3), ("check", 2), ("train", 3), ("test", 1)):
        for label in ("cat", "dog"):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            for i in range(num):
                image.fromarray(np.full((32, 32, 3), 50 * i + len(part), np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"no image")
    return tmp_path


def test_image_folders(folders):
    text = f"data: {{name: image_folder, root: {folders}, train: learn, test: check, resize: [9, 7], cache: true}}"
    config, origin = configured(text)
    made = build.data(config, origin)
    assert (len(made.train), len(made.test), made.num_classes) == (6, 4, 2)
    assert np.asarray(examples(made.train)[0][0]).shape == (3, 9, 7)
    before = np.array(examples(made.train)[5][0])
    for path in folders.glob("learn/dog/*.png"):
        path.write_bytes(b"no image any more")
    np.testing.assert_array_equal(examples(made.train)[5][0], before)  # from memory
    config, origin = configured(text.replace("test: check", "test: null").replace("cache: true", "cache: false"))
    made = build.data(config, origin)
    assert made.test is None
    with pytest.raises(dbrdist.errors.DbrdistError, match=r"dog/0\.png"):
        examples(made.train)
    made = build.data(*configured(text.replace("cache: true", "decode: fast")))
    assert (made.train.decode, made.test.decode) == ("fast", "fast")


@pytest.mark.parametrize("corrupt", ["fail", "skip"])
@pytest.mark.parametrize("name", ["image_folder", "cifar10"])
def test_corrupt_images(folders, name, corrupt):
    config, origin = configured(f"data: {{name: {name}, root: {folders}, corrupt: {corrupt}}}")
    train = build.data(config, origin).train
    at = 3  # after 0.png, 1.png and 2.png of the cats
    if corrupt == "skip":
        skipped = []
        assert len(get_batch(train, np.array([at]), 0, 0, skipped)) == 0
        assert len(skipped) == 1
    else:
        with pytest.raises(dbrdist.errors.DbrdistError, match=r"broken\.png"):
            get_batch(train, np.array([at]), 0, 0, [])


@pytest.mark.parametrize("augment", [True, False])
def test_augmentation_of_cifar10(folders, augment):
    config, origin = configured(f"data: {{name: cifar10, root: {folders}, augment: {augment}, corrupt: skip}}")
    train = build.data(config, origin).train
    first, second = (np.asarray(get_batch(train, np.array([0]), 0, epoch, [])[0][0]) for epoch in (0, 1))
    assert first.shape == second.shape == (3, 32, 32)
    assert (first != second).any() == augment
    if not augment:  # all pixels of the first image are 5; mean and deviation are those of Krizhevsky's training set
        mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
        np.testing.assert_allclose(first[:, 3, 4], (5 / 255 - mean) / std, rtol=1e-4)


def test_label_smoothing():
    config, origin = configured("loss: {name: softmax_cross_entropy, label_smoothing: 0.3}")
    y, t = np.array([[0.5, -1.0, 2.0]]), np.array([1])
    ln_p = y - np.log(np.exp(y).sum())
    expected = -(0.7 * ln_p[0, 1] + 0.1 * ln_p.sum())
    assert float(build.loss(config, origin)(y, t).array) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accumulate: 3", (False, 0, None, 3, 1)),
        ("zero: 2", (False, 2, None, 1, 1)),
        ("local_steps: 5", (False, 0, None, 1, 5)),
        ("double_buffering: true", (True, 0, None, 1, 1)),
        ("compression: {name: power_sgd, rank: 3}", (False, 0, "PowerSGD rank 3", 1, 1)),
        ("compression: {name: top_k, fraction: 0.25}", (False, 0, "TopK fraction 0.25", 1, 1)),
    ],
)
def test_how_gradients_become_updates(text, expected):
    config, _ = configured(text)
    way = build_updates.over_ranks(config, optimizers.SGD(), create_communicator("single"))._way
    assert way._replace(compression=way.compression and way.compression.words()) == expected


def test_the_audit_of_parameters_comes_when_it_is_told_to(run, monkeypatch):
    seen = []
    monkeypatch.setattr(ParameterAudit, "__call__", lambda self, trainer: seen.append(trainer.updater.iteration))
    assert run("run.yaml", "iterations=5", "parameter_audit=2 iterations")[0] == 0
    assert seen == [2, 4]


@pytest.mark.parametrize("words", [["float32_products=bf16"], []])
def test_float32_products_of_a_run(words, run):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "config.float32_products")  # on a processor where it has no effect
        assert run("run.yaml", "iterations=1", *words)[0] == 0
    assert dbrdist.global_config.float32_products == ("bf16" if words else "float32")


@pytest.mark.parametrize("words", [["fused_convolutions=true"], []])
def test_fused_convolutions_of_a_run(words, run):
    assert run("run.yaml", "iterations=1", *words)[0] == 0
    assert dbrdist.global_config.fused_convolutions == bool(words)


@pytest.mark.programs
def test_the_fields_of_a_run(run):
    """One run with everything away from its default, judged by what it leaves behind."""
    words = [
        "batch=50", "epochs=5", "iterations=9", "seed=5", "dtype=float64", "out=there", "workers=1",
        "evaluation.every=4 iterations", "evaluation.batch=31", "snapshot.every=3 iterations", "snapshot.keep=2",
        "snapshot.background=true",
        "log.every=2 iterations", "communicator=naive", "device=cpu", "loss_scale=2", "transforms.train=[]",
        "model=usernet:Sizes", "loss=mean_squared_error", "data=usernet:squares",
    ]  # fmt: skip
    with open("usernet.py", "a") as file:
        file.write(SQUARES)
    code, _, err = run("run.yaml", *words)
    assert code == 0, err
    log = lines("there/log.jsonl")
    assert [entry["iteration"] for entry in log] == [2, 4, 6, 8, 9]
    assert [entry["iteration"] for entry in log if "validation/main/loss" in entry] == [4, 8, 9]
    assert log[-1]["epoch"] == 4  # 9 steps of 50 examples out of 100
    assert sorted(p.name for p in Path("there").glob("snapshot*")) == ["snapshot_iter_6", "snapshot_iter_9"]
    sizes = [line.split() for line in Path("sizes.txt").read_text().splitlines()]
    assert [n for mode, n in sizes if mode == "train"] == ["2", "4"] + ["50"] * 9  # two to measure a step's memory
    assert [n for mode, n in sizes if mode == "test"][-6:] == ["31", "29"] * 3  # 60 examples, three evaluations
    saved = np.load("there/snapshot_iter_9")
    weights = {k: saved[k] for k in saved if k.startswith("updater/model:main")}
    assert {a.dtype.name for a in weights.values() if a.ndim} == {"float64"}
    other = {}
    for seed in (5, 6):
        assert run("run.yaml", *words, f"seed={seed}", f"out=again{seed}", "iterations=1")[0] == 0
        again = np.load(f"again{seed}/snapshot_iter_1")
        other[seed] = {k: again[k] for k in weights}
    assert any((other[5][k] != other[6][k]).any() for k in weights)


def test_what_the_user_adds_to_a_run(run):
    with open("usernet.py", "a") as file:
        file.write(SQUARES)
    words = [
        "batch=50",
        "data=usernet:squares",
        "model=usernet:Sizes",
        "loss=mean_squared_error",
        "transforms.train=[]",
    ]
    assert run("run.yaml", *words, "out=first", "optimizer.lr=1e-30")[0] == 0
    words += ["init_from={path: first, skip: [linear.b]}", "threads=2", "metrics=['usernet:largest']", "seed=3"]
    words += [
        "extensions=[{name: 'usernet:Steps', every: 2 iterations}]",
        "epochs=2",
        "iterations=4",
        "optimizer.lr=1e-30",
    ]
    code, _, err = run("run.yaml", *words)
    assert code == 0, err
    first, second = (np.load(snapshots.newest(folder)) for folder in ("first", "result"))
    key = "updater/model:main/predictor/linear/W"
    np.testing.assert_allclose(second[key], first[key], rtol=1e-6)
    assert Path("steps.txt").read_text() == "2 4 "
    assert lines("result/log.jsonl")[-1]["main/largest"] > 0


def test_virtual_workers(run):
    """Four workers of 13 examples, and of 12 or 13 in the last batch; reproducible sums allow one thread."""
    with open("usernet.py", "a") as file:
        file.write(SQUARES)
    words = ["data=usernet:squares", "model=usernet:Sizes", "loss=mean_squared_error", "transforms.train=[]"]
    words += ["batch={virtual_workers: 4, per_worker: 13}", "reproducible=true", "epochs=1", "audit=true"]
    code, out, err = run("run.yaml", *words)
    assert code == 0, err
    plan = "ranks: 1; batch: 52, that is 4 virtual workers of 13, reproducible with 1 thread per rank"
    assert plan in " ".join(out.split())
    seen = [line.split() for line in Path("sizes.txt").read_text().splitlines()]
    assert [int(n) for part, n in seen if part == "train"][-8:] == [13] * 4 + [12] * 4
    assert [int(n) for part, n in seen if part == "test"][-8:] == [13] * 4 + [2] * 4
    audited = Path("result/audit/start-0001-rank-00000.txt").read_text().splitlines()
    assert [len(line.split()) - 3 for line in audited[2:]] == [13] * 4 + [12] * 4


SQUARES = """

class Sizes(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(3, 2)

    def forward(self, x):
        with open("sizes.txt", "a") as file:
            print("train" if dbrdist.config.train else "test", len(x), file=file)
        return self.linear(x)


def largest(outputs, labels):
    return abs(labels).max()


class Steps(dbrdist.training.Extension):
    def __call__(self, trainer):
        with open("steps.txt", "a") as file:
            print(trainer.updater.iteration, file=file, end=" ")


def squares():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((160, 3)).astype(np.float32)
    rows = [(v, np.array([v.sum(), v[0]], np.float32)) for v in x]
    return rows[:100], rows[100:]
"""


def settings_of(annotation, found):
    """All models below an annotation."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        if annotation not in found:
            found.append(annotation)
            for field in annotation.model_fields.values():
                settings_of(field.annotation, found)
    elif get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        for part in get_args(annotation):
            settings_of(part, found)
    return found


@pytest.mark.slow
def test_each_field_is_given_a_value_of_its_own_here():
    """A reminder for whoever adds a field: its name, with a value, must stand in one of these files."""
    files = (
        "builders/build",
        "builders/build_updates",
        "running/run",
        "running/lr_finder",
        "running/batch_finder",
        "running/loggers",
        "running/shown_examples",
        "configuration/extend",
        "configuration/load",
        "large_batches",
    )
    tests = (ROOT / "tests" / "cli" / Path(name).with_name(f"test_{Path(name).name}.py") for name in files)
    text = "".join(path.read_text() for path in tests)
    models = settings_of(Config, [])
    assert len(models) > 25
    for model in models:
        for key, field in model.model_fields.items():
            if key in ("name", "args") or (model in updates.OPTIMIZERS and key not in ("hooks", "schedule")):
                continue  # each setting of each optimizer has its test in builders/test_build_updates
            spoken = rf"\b{key}\b['\"]?\s*[:=.]"
            assert re.search(spoken, text), f"{model.__name__}.{key} (default {field.default!r}) is tested nowhere here"


@each(repeats=[1, 2, 4, 5])
def test_an_image_comes_at_most_as_often_as_a_batch_has_examples(repeats):
    config, origin = configured(f"repeats: {repeats}")
    data = build.Data(list(range(8)), None, None)
    if repeats == 5:
        with pytest.raises(ConfigError, match=r"^run\.yaml:3:10: repeats: must be at most the batch, 4, got 5$"):
            build._repeated(config, origin, data)
        return
    made = build._repeated(config, origin, data)
    assert len(made.train) == 8 and (made is data) == (repeats == 1)


@each(
    case=[
        (np.zeros((1, 2, 3, 4), np.uint8), True), (np.zeros((1, 2, 3, 4), bool), True),
        (np.zeros((1, 2, 3, 4, 5), np.int64), True), (np.zeros((1, 2, 3, 4), np.float32), False),
        (np.zeros((1, 2, 3), np.uint8), False), ("text", False), (None, False),
    ]
)  # fmt: skip
def test_images_of_integers_become_numbers_of_32_bits(case):
    assert build._are_images_of_integers(case[0]) is case[1]
    assert build._are_whole_numbers(SimpleNamespace(columns=(case[0], None))) is case[1]
    assert build._are_whole_numbers(SimpleNamespace(columns=())) is build._are_whole_numbers(None) is False


@each(case=[(None, False), ("cpu", False), ("gpu", True)])
def test_a_gpu_gets_its_batches_from_pinned_memory(monkeypatch, case):
    device, is_sent = case
    sent, modules = [], {"cpu": "numpy", "gpu": "cupy"}

    class Sends:
        def convert(self, batch, device, dtype):
            sent.append((batch, device, dtype))
            return np.zeros(2, np.float64), np.zeros(2, np.int64)

    monkeypatch.setattr(build, "ConcatWithAsyncTransfer", Sends)
    monkeypatch.setattr(build, "get_device", lambda name: SimpleNamespace(module=modules[name]))
    monkeypatch.setattr(
        build, "concat_examples", lambda batch, device: (np.zeros(2, np.float64), np.zeros(2, np.int64))
    )
    x, t = build.converter("float32")([1], device)
    assert sent == [([1], "gpu", np.dtype("float32"))] * is_sent and (x.dtype, t.dtype) == (np.float32, np.int64)


@each(
    case=[
        ((np.zeros(2, np.float64), np.zeros(2, np.int32)), ["f4", "i4"]), ((np.zeros(2, bool),), ["b1"]),
        ((np.zeros(2, np.float32), np.zeros(2, np.float64)), ["f4", "f4"]), (np.zeros(2, np.float16), ["f4"]),
        ({"a": np.zeros(2, np.float64), "b": np.zeros(2, "u1"), "c": np.zeros(2, "c8")}, ["f4", "u1", "c8"]),
        (np.zeros(2, np.int8), ["i1"]),
    ]
)  # fmt: skip
def test_floating_numbers_of_a_batch_are_cast_and_others_left(monkeypatch, case):
    arrays, dtypes = case
    monkeypatch.setattr(build, "concat_examples", lambda batch, device: arrays)
    found = build.converter("float32")([1])
    found = list(found.values()) if isinstance(found, dict) else [found] if isinstance(found, np.ndarray) else found
    assert [x.dtype for x in found] == [np.dtype(name) for name in dtypes]


@each(is_own=[False, True])
def test_images_of_integers_are_numbers_for_networks_of_ours(monkeypatch, is_own):
    images, labels = np.full((1, 3, 2, 2), 7, np.uint8), np.zeros(1, np.int32)
    given = [(images, labels), (images.astype("f4"), labels), {"x": images}, (), images]
    monkeypatch.setattr(build, "converter", lambda dtype: lambda batch, device: given[batch])
    model = build.Custom(name="own:Net") if is_own else object()
    convert = build.converter_for(SimpleNamespace(dtype="float32", model=model))
    for number in range(1 - is_own, len(given)):
        assert convert(number, None) is given[number]
    if not is_own:
        x, t = convert(0, None)
        assert x.dtype == np.float32 and (x == 7).all() and t is labels


def transformed_arrays(x, transforms):
    config, origin = configured(f"transforms: {{train: [{transforms}]}}")
    return build._transformed(datasets.TupleDataset(x, np.zeros(len(x), np.int32)), config, origin, "train")


@each(
    **{"shape, transforms, words": [
        ((12, 12), "random_erasing", r"for random_erasing, got an example of \(12, 12\); gray .* x\[:, None\]"),
        ((12, 12), "random_flip, {name: random_crop, size: 8}", "for random_crop"),
        ((144,), "random_flip", r"expected images \(C, H, W\) for random_flip, got an example of \(144,\)$"),
        ((144,), "{name: normalize, mean: [0.5], std: [1.0]}", r"for normalize, got an example of \(144,\)$"),
        ((12, 12), "random_flip, {name: normalize, mean: [0.5], std: [1.0]}", None), ((144,), "mixup", None),
        ((12, 12), "{name: resize, size: 12}", "for resize"), ((144,), "'math:nan', random_flip", None),
    ]}
)  # fmt: skip
def test_transforms_of_images_refuse_other_inputs_each_time(monkeypatch, shape, transforms, words):
    monkeypatch.setattr(
        build, "_UserTransform", lambda *source: lambda example, rng: (example[0].reshape(1, 12, 12), 0)
    )
    made = transformed_arrays(np.zeros((16, *shape), np.float32), transforms)
    for i in range(16):
        if words is None:
            made[i]
            continue
        with pytest.raises(ValueError, match=words):
            made[i]


@each(
    case=[
        ((12, 12, 3), True), ((9, 8, 4), True), ((8, 8, 1), True), ((9, 8, 1), False), ((3, 12, 12), False),
        ((12, 12, 12), False), ((7, 9, 3), False), ((9, 7, 3), False),
    ]
)  # fmt: skip
def test_images_with_their_channels_last_are_warned_of_once(case):
    shape, is_warned = case
    for transforms in ("", "random_flip"):
        made = transformed_arrays(np.zeros((4, *shape), np.uint8), transforms)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            [made[i] for i in range(4)]
        expected = f"transforms take an example of {shape} as (C, H, W), {shape[0]} channels of {shape[1]}x{shape[2]}"
        assert [str(w.message).partition(" pixels")[0] for w in said] == [expected] * (is_warned and bool(transforms))


@each(y=[np.zeros(4), np.zeros((4, 1), int), np.eye(4), np.ones(4, bool)])
def test_targets_that_are_no_labels_are_named_where_classes_are_counted(y):
    data = datasets.TupleDataset(np.zeros((4, 2)), y)
    with pytest.raises(ValueError, match=rf"^expected one integer .* label, got {y.dtype} of .*model.num_classes$"):
        build._classes(data, is_needed=True)
    assert build._classes(data) is None


@each(case=[(999, 0), (1000, 1), (2_000_000, 1)])
def test_labels_far_beyond_the_examples_are_warned_of(case):
    label, num_warned = case
    data = datasets.TupleDataset(np.zeros((4, 2)), np.array([0, 1, 2, label]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert build._classes(data, is_needed=True) == build._classes(data) == label + 1
    assert [f"a network of {label + 1:,} outputs, for 4 training" in str(w.message) for w in said] == [
        True
    ] * num_warned
