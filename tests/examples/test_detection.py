"""The detector's boxes, evaluation, coder and loss against definitions that are written out element by element."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "detection"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(FOLDER))
    names = ("boxes", "ssd", "train")
    yield tuple(importlib.import_module(name) for name in names)
    sys.path.remove(str(FOLDER))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random_boxes(rng, number, size=20):
    begin = rng.integers(0, size - 6, (number, 2))
    return np.concatenate([begin, begin + rng.integers(2, 7, (number, 2))], axis=1).astype("f")


def painted(bbox, size):
    """A picture in which the pixels of a box are 1."""
    img = np.zeros((1, *size))
    y0, x0, y1, x1 = bbox.astype(int)
    img[:, y0:y1, x0:x1] = 1
    return img


def area_of(img):
    _, y, x = np.nonzero(img)
    return [y.min(), x.min(), y.max() + 1, x.max() + 1]


# ---- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("y_flip", [False, True])
@pytest.mark.parametrize("x_flip", [False, True])
def test_boxes_are_flipped_with_the_picture(modules, rng, y_flip, x_flip):
    boxes = modules[0]
    for bbox in random_boxes(rng, 20):
        img = boxes.flip(painted(bbox, (20, 30)), y_flip, x_flip)
        found = boxes.flip_bbox(bbox[None], (20, 30), y_flip, x_flip)
        np.testing.assert_array_equal(found[0], area_of(img))


def test_boxes_are_resized_and_moved_with_the_picture(modules, rng):
    boxes = modules[0]
    for bbox in random_boxes(rng, 10):
        img = painted(bbox, (20, 20)).repeat(2, axis=1).repeat(3, axis=2)
        np.testing.assert_array_equal(boxes.resize_bbox(bbox[None], (20, 20), (40, 60))[0], area_of(img))
        moved = np.pad(painted(bbox, (20, 20)), ((0, 0), (4, 0), (7, 0)))
        np.testing.assert_array_equal(boxes.translate_bbox(bbox[None], 4, 7)[0], area_of(moved))


def test_boxes_are_cropped_with_the_picture(modules, rng):
    boxes, bbox = modules[0], random_boxes(rng, 50)
    y, x = slice(5, 14), slice(3, 12)
    cropped, param = boxes.crop_bbox(bbox, y, x, return_param=True)
    inside = [i for i, b in enumerate(bbox) if painted(b, (20, 20))[:, y, x].any()]
    np.testing.assert_array_equal(param["index"], inside)
    for i, found in zip(inside, cropped):
        np.testing.assert_array_equal(found, area_of(painted(bbox[i], (20, 20))[:, y, x]))
    _, param = boxes.crop_bbox(bbox, y, x, allow_outside_center=False, return_param=True)
    centers = (bbox[:, :2] + bbox[:, 2:]) / 2
    assert list(param["index"]) == [i for i in inside if 5 <= centers[i, 0] < 14 and 3 <= centers[i, 1] < 12]


# ---- overlap and evaluation -----------------------------------------------------------------------------------------


def test_overlap_counts_pixels(modules, rng):
    a, b = random_boxes(rng, 7), random_boxes(rng, 9)
    for i, j in np.ndindex(7, 9):
        one, two = painted(a[i], (20, 20)) > 0, painted(b[j], (20, 20)) > 0
        assert modules[0].bbox_iou(a, b)[i, j] == pytest.approx((one & two).sum() / (one | two).sum())


def test_suppression_keeps_what_overlaps_no_better_one(modules, rng):
    bbox, score = random_boxes(rng, 40), rng.random(40)
    kept = list(modules[0].non_maximum_suppression(bbox, 0.3, score))
    iou = modules[0].bbox_iou(bbox, bbox)
    assert kept == sorted(kept, key=lambda i: -score[i])
    for i in range(40):
        beaten = any(score[j] > score[i] and iou[i, j] >= 0.3 for j in kept)
        assert (i in kept) != beaten
    assert list(modules[0].non_maximum_suppression(bbox, 0.3, score, limit=3)) == kept[:3]


def brute_force_ap(pred, truth, label, by_07):
    """Average precision of one label, each step written out."""
    found = sorted(((s, i, b) for i, (bs, ls, ss) in enumerate(pred) for b, l, s in zip(bs, ls, ss) if l == label),
                   key=lambda entry: -entry[0])  # fmt: skip
    total = sum(l == label and not d for _, ls, ds in truth for l, d in zip(ls, ds))
    used, right, wrong, curve = set(), 0, 0, []
    for _, i, b in found:
        best, at = 0.0, None
        for j, (t, l) in enumerate(zip(truth[i][0], truth[i][1])):
            if l != label:
                continue
            h = min(b[2], t[2]) - max(b[0], t[0]) + 1
            w = min(b[3], t[3]) - max(b[1], t[1]) + 1
            shared = max(h, 0) * max(w, 0)
            area = [(q[2] - q[0] + 1) * (q[3] - q[1] + 1) for q in (b, t)]
            overlap = shared / (sum(area) - shared)
            if overlap > best:
                best, at = overlap, j
        if best >= 0.5 and truth[i][2][at]:
            pass
        elif best >= 0.5 and (i, at) not in used:
            used.add((i, at))
            right += 1
        else:
            wrong += 1
        if right + wrong:
            curve.append((right / total if total else np.nan, right / (right + wrong)))
    if not total:
        return np.nan
    best_from = lambda r: max((p for s, p in curve if s >= r), default=0.0)  # noqa: E731
    if by_07:
        return np.mean([best_from(r) for r in np.arange(0.0, 1.1, 0.1)])
    recalls = sorted({r for r, _ in curve})
    return sum((r - before) * best_from(r) for before, r in zip([0.0, *recalls], recalls))


@pytest.mark.parametrize("by_07", [False, True])
def test_average_precision_is_that_of_the_definition(modules, rng, by_07):
    truth, pred = [], []
    for _ in range(12):
        n = rng.integers(0, 5)
        bbox, label = random_boxes(rng, n), rng.integers(0, 3, n)
        truth.append((bbox, label, rng.random(n) < 0.2))
        noisy = np.concatenate([bbox + rng.integers(-1, 2, bbox.shape), bbox, random_boxes(rng, 2)]).astype("f")
        labels = np.concatenate([label, label, rng.integers(0, 4, 2)])
        pred.append((noisy, labels, rng.permutation(100)[: len(noisy)] / 100 + rng.random(len(noisy)) / 1000))
    result = modules[0].eval_detection_voc(*zip(*pred), *zip(*truth), use_07_metric=by_07)
    expected = [brute_force_ap(pred, truth, label, by_07) for label in range(len(result["ap"]))]
    np.testing.assert_allclose(result["ap"], expected)
    assert result["map"] == pytest.approx(np.nanmean(expected))


def test_nothing_found_and_nothing_there(modules):
    none, box = np.zeros((0, 4), "f"), np.array([[0, 0, 4, 4]], "f")
    zero, empty = np.zeros(1, "i"), np.zeros(0, "i")
    evaluate = modules[0].eval_detection_voc
    assert evaluate([none], [empty], [np.zeros(0)], [box], [zero])["map"] == 0
    assert np.isnan(evaluate([box], [zero], [np.ones(1)], [none], [empty])["map"])
    assert evaluate([box], [zero], [np.ones(1)], [box], [zero])["map"] == 1


# ---- the detector ---------------------------------------------------------------------------------------------------


def test_what_is_encoded_is_decoded(modules, rng):
    coder = modules[1].MultiboxCoder(64, [(8, (0.22, 0.34)), (4, (0.45, 0.62))])
    bbox, label = np.array([[3, 5, 20, 30], [30, 30, 60, 50]], "f"), np.array([1, 0])
    offsets, labels = coder.encode(bbox, label)
    found, found_labels, _ = coder.decode(offsets, 20.0 * np.eye(3)[labels])
    for b, l in zip(bbox, label):
        np.testing.assert_allclose(found[found_labels == l], b[None], atol=1e-3)
    assert coder.encode(bbox[:0], label[:0])[1].sum() == 0


def test_each_object_has_a_default_box_even_if_none_overlaps_much(modules):
    coder = modules[1].MultiboxCoder(64, [(4, (0.5,))])
    _, labels = coder.encode(np.array([[0, 0, 3, 3], [0, 4, 3, 7]], "f"), np.array([4, 2]))
    assert sorted(labels[labels > 0]) == [3, 5]


def test_the_loss_takes_objects_and_the_worst_of_the_background(modules, rng):
    import dbrdist

    n, boxes, classes = 2, 30, 4
    offsets, truth = rng.normal(0, 2, (2, n, boxes, 4)).astype("f")
    scores = rng.normal(0, 1, (n, boxes, classes)).astype("f")
    labels = np.where(rng.random((n, boxes)) < 0.1, rng.integers(1, classes, (n, boxes)), 0).astype("i")
    place, label = modules[1].multibox_loss(dbrdist.Variable(offsets), dbrdist.Variable(scores), truth, labels)
    count, expected_place, expected_label = (labels > 0).sum(), 0.0, 0.0
    for i in range(n):
        entropies = [np.log(np.exp(s).sum()) - s[t] for s, t in zip(scores[i], labels[i])]
        here = [j for j in range(boxes) if labels[i, j]]
        ground = sorted((entropies[j] for j in range(boxes) if not labels[i, j]), reverse=True)
        expected_label += sum(entropies[j] for j in here) + sum(ground[: 3 * len(here)])
        for d in np.abs(offsets[i, here] - truth[i, here]).ravel():
            expected_place += 0.5 * d * d if d < 1 else d - 0.5
    assert float(place.array) == pytest.approx(expected_place / count, rel=1e-4)
    assert float(label.array) == pytest.approx(expected_label / count, rel=1e-4)


def test_drawn_objects_fill_their_boxes(modules):
    for img, bbox, label in (modules[2].DrawnObjects(5, 0)[i] for i in range(5)):
        assert img.shape == (3, 64, 64) and len(bbox) == len(label) >= 1
        assert (bbox >= 0).all() and (bbox <= 64).all() and (bbox[:, 2:] - bbox[:, :2] >= 12).all()


@pytest.mark.slow
def test_a_short_training_runs(modules, tmp_path):
    words = ["--epochs", "1", "--pictures", "64", "--test-pictures", "8", "--out", str(tmp_path)]
    assert 0 <= np.nan_to_num(modules[2].main(words)) <= 1
