"""Tests of dbrdist.cli.running.shown_examples."""

from __future__ import annotations

import base64
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.running import shown_examples
from dbrdist.cli.running.shown_examples import Collector, ShowTestExamples, picture_of, png
from tests.each import each

PIL = pytest.importorskip("PIL.Image", reason="Pillow, which reads the pictures, is not installed")


def batch(rng, n=40, num_classes=5):
    return rng.standard_normal((n, 1, 4, 4)).astype("f"), 3 * rng.standard_normal((n, num_classes)).astype("f")


def test_the_worst_mistakes_and_the_first_examples_of_all_batches():
    rng = np.random.default_rng(0)
    collector, everything = Collector(6, True), []
    for _ in range(5):
        images, scores = batch(rng)
        labels = rng.integers(0, 5, len(images)).astype("i")
        collector(images, scores, labels)
        everything += list(zip(images, scores.astype("d"), labels))
    shares = [np.exp(s - s.max()) / np.exp(s - s.max()).sum() for _, s, _ in everything]
    losses = np.array([-np.log(p[t]) for p, (_, _, t) in zip(shares, everything)])
    wrong = [i for i, (_, s, t) in enumerate(everything) if s.argmax() != t]
    expected = sorted(wrong, key=lambda i: -losses[i])[:6]
    assert [one.loss for one in collector.worst] == pytest.approx(losses[expected])
    assert all(np.array_equal(one.image, everything[i][0]) for one, i in zip(collector.worst, expected))
    assert [one.label for one in collector.first] == [t for _, _, t in everything[:6]]
    for one, i in zip(collector.worst, expected):
        order = np.argsort(-shares[i])[:3]
        assert [k for k, _ in one.likeliest] == list(order)
        assert [p for _, p in one.likeliest] == pytest.approx(shares[i][order])
    collector.clear()
    assert collector.first == collector.worst == []


@each(
    case=[
        (np.zeros((2, 3)), np.zeros((2, 5)), np.zeros(2, "i")),  # no images
        (np.zeros((2, 4, 8, 8)), np.zeros((2, 5)), np.zeros(2, "i")),  # of four channels
        (np.zeros((2, 1, 8, 8)), np.zeros((2, 5, 7)), np.zeros((2, 7), "i")),  # a label for each place
        (np.zeros((2, 1, 8, 8)), np.zeros((2, 5)), np.zeros((2, 5), "f")),  # soft labels
        (np.zeros((2, 1, 8, 8)), np.full((2, 5), np.nan), np.zeros(2, "i")),
        (np.zeros((2, 1, 8, 8)), np.zeros((2, 5)), np.array([-1, 5])),  # labels that are ignored
        (np.zeros((0, 1, 8, 8)), np.zeros((0, 5)), np.zeros(0, "i")),
    ]
)
def test_what_is_no_classified_image_is_left_out(case):
    collector = Collector(3, True)
    collector(*case)
    assert collector.first == collector.worst == []


def test_scores_of_any_size_give_probabilities():
    collector = Collector(3, True)
    scores = np.array([[1e30, 0, -1e30], [-np.inf, 0, 0], [5e4, 4e4, 0]])
    collector(np.ones((3, 3, 2, 2), np.float16), scores, np.array([0, 1, 0]))
    assert len(collector.first) == 3
    assert all(0 <= p <= 1 for one in collector.first for _, p in one.likeliest)


def read(data):
    return np.array(PIL.open(io.BytesIO(data)))


@each(shape=[(1, 8, 8), (3, 8, 8), (3, 5, 7), (1, 1, 1), (3, 1, 96)])
def test_pictures_keep_every_pixel(shape):
    image = np.random.default_rng(1).standard_normal(shape).astype("f")
    low, high = image.min(), image.max()
    expected = (
        np.round((image.astype("d") - low) * (255 / (float(high) - float(low)))) if high > low else np.full(shape, 128)
    )
    found = read(png(picture_of(image)))
    assert np.array_equal(found.reshape(shape[1], shape[2], -1), expected.transpose(1, 2, 0).astype("u1"))


@each(shape=[(3, 224, 224), (1, 97, 200), (3, 1, 500), (3, 1000, 3)])
def test_large_images_become_small_pictures(shape):
    assert max(picture_of(np.random.default_rng(1).standard_normal(shape)).shape[:2]) <= 96
    square = np.zeros((1, 192, 192))
    square[:, 96:] = 1
    assert np.array_equal(picture_of(square)[:, :, 0], np.repeat([[0], [255]], [48, 48], 0) * np.ones((96, 96)))


def test_large_images_become_means_over_squares():
    """200 pixels become 66 of 3 by 3, of which the last two are left out; an image lower than a square keeps lines."""
    image = np.random.default_rng(1).uniform(0, 1, (3, 200, 100))
    means = np.array([[[c[i : i + 3, j : j + 3].sum() / 9 for j in range(0, 99, 3)] for i in range(0, 198, 3)]
                      for c in image])  # fmt: skip
    expected = (means - means.min()) / (means.max() - means.min()) * 255
    assert abs(picture_of(image).astype("d") - expected.transpose(1, 2, 0)).max() <= 0.5 + 1e-9
    assert np.array_equal(picture_of(np.arange(500.0)[None, None])[0, :, 0], np.round(np.arange(0, 500, 6) / 498 * 255))


@each(value=[np.nan, np.inf, -np.inf, 0.0, 1e38])
def test_pictures_of_any_numbers(value):
    image = np.zeros((1, 2, 2), "f")
    image[0, 0, 0] = value
    assert picture_of(image).shape == (2, 2, 1)


class Ranks:
    """Two ranks, of which this is one, and the other one answered before."""

    size = 2

    def __init__(self, rank, theirs):
        self.rank, self.theirs = rank, theirs

    def allgather_obj(self, mine):
        return [mine, [one.loss for one in self.theirs]]

    def gather_obj(self, mine):
        return [mine, self.theirs] if self.rank == 0 else None


def test_of_several_ranks_the_worst_of_all_are_written(tmp_path):
    rng = np.random.default_rng(3)
    theirs = Collector(4, False)
    images, scores = batch(rng)
    theirs(images, scores, rng.integers(0, 5, 40))
    task, path = SimpleNamespace(on_outputs=None), tmp_path / "shown.json"
    extension = ShowTestExamples(task, Ranks(0, theirs.worst), 4, str(path), ["a", "b", "c", "d", "e"], pytest.fail)
    trainer = SimpleNamespace(updater=SimpleNamespace(iteration=7, epoch_detail=1.5))
    extension.begin()
    images, scores = batch(rng)
    task.on_outputs(images, scores, rng.integers(0, 5, 40))
    mine = list(extension._collector.worst)
    extension(trainer)
    assert task.on_outputs is None
    found = json.loads(path.read_text())
    expected = sorted([*mine, *theirs.worst], key=lambda one: -one.loss)[:4]
    assert [one["loss"] for one in found["worst"]] == [one.loss for one in expected]
    assert len(found["first"]) == 4 and found["epoch"] == 1.5 and found["classes"] == ["a", "b", "c", "d", "e"]
    assert np.array_equal(read(base64.b64decode(found["worst"][0]["image"])), picture_of(expected[0].image)[:, :, 0])
    assert not theirs.first


def test_files_are_written_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(shown_examples.time, "monotonic", lambda: now[0])
    path, said = tmp_path / "shown.json", []
    comm = SimpleNamespace(rank=0, size=1)
    extension = ShowTestExamples(SimpleNamespace(), comm, 4, str(path), None, said.append)
    for iteration, seconds, expected in [(1, 0, 1), (2, 1, 1), (3, 3.5, 1), (4, 1, 4), (5, 1, 4)]:
        now[0] += seconds
        extension.begin()
        extension(SimpleNamespace(updater=SimpleNamespace(iteration=iteration, epoch_detail=0.0)))
        assert json.loads(path.read_text())["iteration"] == expected
    extension.finalize()
    assert json.loads(path.read_text())["iteration"] == 5 and not said


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path):
    said = []
    path = str(tmp_path / "nowhere" / "shown.json")
    extension = ShowTestExamples(SimpleNamespace(), SimpleNamespace(rank=0, size=1), 4, path, None, said.append)
    extension._last = -1e9
    for _ in range(3):
        extension.begin()
        extension(SimpleNamespace(updater=SimpleNamespace(iteration=1, epoch_detail=0.0)))
        extension._last = -1e9
    assert said == [f"{path}: the test examples could not be written: No such file or directory"]


@pytest.mark.slow
def test_a_run_keeps_so_many_examples_or_none(run):
    words = ("run.yaml", "model=mlp", "transforms.train=[]")
    run(*words, "log.examples=5")
    with open("result/test_examples.json") as file:
        found = json.load(file)
    assert len(found["first"]) == len(found["worst"]) == 5 and found["iteration"] == 3
    assert all(one["likeliest"][0][0] != one["label"] for one in found["worst"])
    code, _, _ = run(*words, "log.examples=0", "out=none")
    assert code == 0 and not os.path.exists("none/test_examples.json")


def test_a_mistake_between_the_worst_and_the_next_is_kept():
    """Of scores s against 0 the loss is log(1 + exp(s)); of equal ones the first stays."""
    collector = Collector(2, False)

    def take(*scores):
        images = np.arange(len(scores), dtype="f4")[:, None, None, None] + scores[0]
        outputs = np.array([[score, 0.0] for score in scores])
        collector(np.broadcast_to(images, (len(scores), 1, 2, 2)), outputs, np.ones(len(scores), "i4"))
        return [one.loss for one in collector.worst]

    def losses(*scores):
        return pytest.approx([np.log1p(np.exp(score)) for score in scores])

    assert take(5.0, 1.0) == losses(5, 1)
    assert take(3.0) == losses(5, 3)
    assert take(3.0, 4.0, 2.0) == losses(5, 4)
    kept = collector.worst[1].image
    assert take(4.0) == losses(5, 4) and collector.worst[1].image is kept
    assert not collector.first and [one.label for one in collector.worst] == [1, 1]
    assert [one.likeliest[0][0] for one in collector.worst] == [0, 0]
    assert ShowTestExamples.priority == 299  # after the evaluation, before the log


@each(**{"image, expected": [
    ([[np.inf, 5e29], [0, -np.inf]], [[255, 191], [128, 0]]),
    ([[np.nan, 1], [2, 4]], [[0, 64], [128, 255]]),
    ([[3, 3], [3, 3]], [[128, 128], [128, 128]]),
]})  # fmt: skip
def test_infinities_are_numbers_beyond_all_others(image, expected):
    assert picture_of(np.array([image], "d"))[:, :, 0].tolist() == expected
