"""Tests of dbrdist.cli.inspection.predict."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
from dbrdist.cli.inspection import predict
from dbrdist.core.array.config import config as core_config
from dbrdist.errors import ConfigError, CorruptExampleError
from tests.cli.config_helpers import configured


def test_the_likeliest_classes():
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.15, 0.1, 0.15]))
    text = predict._likeliest(scores, ["a", "b", "c", "d", "e"])
    best = np.argsort(-np.exp(scores), kind="stable")[:3]
    assert text == ", ".join(f"{'abcde5'[k]} {100 * np.exp(scores[k]):.1f} %" for k in best)
    assert predict._likeliest(np.zeros(2), ["a"]).split(", ") == ["a 50.0 %", "1 50.0 %"]


def photographs(root):
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for label, name in enumerate(["cat", "dog", "owl"]):
            Path(root, part, name).mkdir(parents=True)
            for i in range(8):
                pixels = np.clip(rng.normal(70 * label + 50, 10, (20, 24, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(Path(root, part, name, f"{i}.png"))


CHAIN = "[{name: center_crop, size: 16}, {name: normalize, mean: [0.5], std: [0.2]}]"
PHOTOS = ["data={name: image_folder, root: photos}", f"transforms={{train: {CHAIN}, test: {CHAIN}}}", "model=mlp"]


@pytest.mark.slow
def test_predictions_name_the_classes(run):
    photographs("photos")
    assert (
        run("run.yaml", *PHOTOS, "batch=8", "epochs=40", "optimizer={name: adam, alpha: 0.003}", "iterations=null")[0]
        == 0
    )
    images = [f"photos/test/{name}/3.png" for name in ("owl", "cat", "dog")]
    code, out, err = run("--predict", "result", *images)
    assert code == 0, err
    found = out.splitlines()
    assert [line.split(": ")[0] for line in found] == images
    assert [line.split(": ")[1].split()[0] for line in found] == ["owl", "cat", "dog"]
    shares = [float(x) for x in re.findall(r"([\d.]+) %", found[0])]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.2) and shares == sorted(shares, reverse=True)
    # the same by hand
    from PIL import Image

    x = np.asarray(Image.open(images[0]), np.float32)[2:18, 4:20].transpose(2, 0, 1)[None]
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        scores = np.asarray(dbrdist.load("result")((x / 255 - 0.5) / 0.2).array[0], np.float64)
    expected = 100 * np.exp(scores[2]) / np.exp(scores).sum()
    assert shares[0] == pytest.approx(expected, abs=0.06)
    Image.new("RGB", (8, 8)).save("small.png")
    code, out, err = run("--predict", "result", "nowhere.png", images[0], "small.png", images[1])
    assert code == 2 and out.splitlines() == found[:2]
    assert "nowhere.png: No such file" in err and "small.png: expected an image of at least 16x16" in err
    code, _, err = run("--predict", "result", "photos")
    assert code == 2 and "photos: Is a directory" in err
    code, _, err = run("--predict", "result")
    assert code == 2 and "expected image files" in err


@pytest.mark.slow
def test_predictions_need_classes_with_names(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    code, _, err = run("--predict", "result", "x.png")
    assert code == 2 and "this run has no named classes" in err


@pytest.mark.slow
def test_a_prediction_mirrors_where_evaluations_do(run):
    from PIL import Image

    photographs("photos")
    assert run("run.yaml", *PHOTOS, "batch=8", "iterations=3", "evaluation.flip=true")[0] == 0
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, :5] = 255
    for name, image in (("left.png", pixels), ("right.png", pixels[:, ::-1])):
        Image.fromarray(image).save(name)
    code, out, err = run("--predict", "result", "left.png", "right.png")
    assert code == 0, err
    left, right = (line.partition(": ")[2] for line in out.splitlines())
    assert left == right
    x = ((pixels.transpose(2, 0, 1)[None] / np.float32(255) - 0.5) / 0.2).astype(np.float32)
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        net = dbrdist.load("result")
        scores = np.asarray((net(x).array + net(np.ascontiguousarray(x[..., ::-1])).array)[0] / 2, np.float64)
    assert left == predict._likeliest(scores, ["cat", "dog", "owl"])


@pytest.mark.slow
def test_scores_that_are_not_finite_name_no_class(run):
    photographs("photos")
    assert run("run.yaml", *PHOTOS, "batch=8", "iterations=1")[0] == 0
    path = "result/snapshot_iter_1"
    with np.load(path) as saved:
        entries = dict(saved)
    entries["updater/model:main/predictor/2/b"][:] = np.nan
    with open(path, "wb") as file:
        np.savez(file, **entries)
    code, out, err = run("--predict", "result", "photos/test/cat/0.png")
    assert code == 2 and out == "" and "photos/test/cat/0.png: the network gives scores that are not finite" in err


def test_what_an_image_goes_through_where_a_run_has_no_test_transforms():
    """Each random one as its mean, with the last of its sizes, or left out."""
    chain = (
        "[{name: random_resized_crop, size: [[0, 8], [5, 16]], method: area}, "
        "{name: random_crop, size: 7, padding: 1}, {name: resize, size: [[0, 9], [2, 11]]}, random_flip, "
        "{name: color_jitter, hue: 0.1}, "
        "{name: normalize, mean: [0.5], std: [0.2]}, {name: center_crop, size: 5}, {name: mixup, p: 0.5}]"
    )
    words = f"transforms: {{train: {chain}}}"
    config, origin = configured("data: {name: image_folder, root: x, test: null}", words)
    found = [one.model_dump(exclude_unset=True) for one in predict.of_an_image(config, origin)]
    assert found == [
        {"name": "center_resized_crop", "size": 16, "ratio": 1.0, "method": "area"}, {"name": "center_crop", "size": 7},
        {"name": "resize", "size": 11}, {"name": "normalize", "mean": (0.5,), "std": (0.2,)},
        {"name": "center_crop", "size": 5},
    ]  # fmt: skip
    own, origin = configured("data: {name: image_folder, root: x, test: null}", "transforms: {train: ['a:b']}")
    with pytest.raises(ConfigError) as caught:
        predict.of_an_image(own, origin)
    assert str(caught.value).partition(": ")[2] == (
        "transforms.train.0: this run has no test transforms, and a:b may be random; say what images to predict go "
        "through: --predict RUN IMAGE... transforms.test='[...]'"
    )
    tested, origin = configured("data: {name: image_folder, root: x}", words)  # its test images go through nothing
    assert predict.of_an_image(tested, origin) == ()
    given, origin = configured(
        "data: {name: image_folder, root: x, test: null}",
        f"transforms: {{train: {chain}, test: [{{name: center_crop, size: 3}}]}}",
    )
    assert [one.size for one in predict.of_an_image(given, origin)] == [3]


def test_cifar_images_are_normalized_and_photographs_made_smaller_first():
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.247, 0.2435, 0.2616])
    found = predict._transform(*configured("data: {name: cifar10, root: x}"))(image)
    np.testing.assert_allclose(found, ((image / 255 - mean) / std).transpose(2, 0, 1), rtol=1e-5)
    resized = configured("data: {name: image_folder, root: x, resize: [2, 3]}", "transforms: {test: []}")
    assert predict._transform(*resized)(image).shape == (3, 2, 3)


def test_images_are_decoded_as_the_run_decodes_them(monkeypatch):
    """Each that is bad is named, behind the others."""
    asked = []

    def read_image(name, fast):
        asked.append((name, fast))
        raise CorruptExampleError(f"{name}: is no image") if name == "a" else ValueError("too small")

    monkeypatch.setattr(predict, "read_recipe", lambda folder: {"classes": ["x"]})
    monkeypatch.setattr(predict, "read_newest", lambda run: ("snapshot", {}))
    monkeypatch.setattr(predict.build, "model", lambda *words: None)
    monkeypatch.setattr(predict, "fill_weights", lambda *words: None)
    monkeypatch.setattr(predict, "read_image", read_image)
    for data, fast in (("decode: fast", True), ("decode: exact", False), ("train: train", False)):
        config, origin = configured(f"data: {{name: image_folder, root: x, {data}}}")
        with pytest.raises(ConfigError) as caught:
            list(predict.predict(config, origin, "run", ["a", "b"]))
        assert str(caught.value) == "dbrdist-train: a: is no image\ndbrdist-train: b: too small"
        assert asked == [("a", fast), ("b", fast)]
        asked.clear()
    with pytest.raises(ConfigError, match=r"^run: this run has no named classes; --predict needs a run on folders of"):
        list(predict.predict(*configured(), "run", ["a"]))


def test_images_go_through_the_network_as_in_an_evaluation(monkeypatch):
    """One by one, mirrored as well where evaluations do that; scores that are not finite are no classes."""
    seen = []

    def network(images):
        seen.append((images, core_config.train, core_config.enable_backprop))
        return SimpleNamespace(array=np.array([[0.0, math.log(3)], [9.0, 9.0]]))

    def mirrored(given, images):
        assert given is network
        seen.append(("mirrored", images, core_config.train))
        return SimpleNamespace(array=np.array([[math.nan, 0.0]]))

    filled = []
    monkeypatch.setattr(predict, "read_recipe", lambda folder: {"classes": ["x", "y"]})
    monkeypatch.setattr(predict, "read_newest", lambda run: ("snapshot", {"w": 1}))
    monkeypatch.setattr(predict.build, "model", lambda *words: network)
    monkeypatch.setattr(predict.build, "converter", lambda dtype: lambda batch: ("batch", batch, dtype))
    monkeypatch.setattr(predict, "fill_weights", lambda *words: filled.append(words))
    monkeypatch.setattr(predict, "read_image", lambda name, fast: f"pixels of {name}")
    monkeypatch.setattr(predict, "_transform", lambda config, origin: lambda image: f"turned {image}")
    monkeypatch.setattr(predict, "mean_over_mirrored", mirrored)
    monkeypatch.setattr(predict, "global_config", SimpleNamespace())
    data = "data: {name: image_folder, root: x}"
    config, origin = configured(data, "evaluation: {flip: false}", "dtype: mixed16")
    found = list(predict.predict(config, origin, "run", ["a", "b"]))
    assert found == ["a: y 75.0 %, x 25.0 %", "b: y 75.0 %, x 25.0 %"]
    assert seen == [(("batch", [f"turned pixels of {name}"], config.dtype), False, False) for name in "ab"]
    assert filled == [("snapshot", {"w": 1}, network, "predictor/")]
    assert vars(predict.global_config) == {"dtype": config.dtype, "float32_products": config.float32_products}
    seen.clear()
    config, origin = configured(data, "evaluation: {flip: true}")
    with pytest.raises(
        ConfigError, match=r"^dbrdist-train: a: the network gives scores that are not finite: snapshot$"
    ):
        list(predict.predict(config, origin, "run", ["a"]))
    assert seen == [("mirrored", ("batch", ["turned pixels of a"], config.dtype), False)]
