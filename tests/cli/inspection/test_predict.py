"""Tests of dbrdist.cli.inspection.predict."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.cli.inspection import predict


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
