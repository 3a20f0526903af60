"""Tests of dbrdist.cli.builders.preflight."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.builders import preflight
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import ConfigError, UsageWarning
from tests.each import each


class Look:
    words, dataset = "training", None

    def __init__(self, loss="softmax_cross_entropy", outputs=(4, 3)):
        self.config = SimpleNamespace(loss=SimpleNamespace(name=loss))
        self.outputs = outputs

    def through(self, function, inputs):
        return np.zeros(self.outputs, "f")

    def mistake(self, key, text):
        return ConfigError(f"{key}: {text}")


@each(
    case=[
        (np.array([[0, 1, 2, -1]]), {"outputs": (1, 3, 4)}, None),
        (np.array([0, 1, 3]), {}, "model: the network has 3 outputs, but a training label"),
        (np.array([-2, 1]), {}, "data: a training label is -2; classes are counted from 0"),
        (np.array([-2, 1]), {"loss": "hinge"}, None), (np.array([5]), {"outputs": (4,)}, None),
        (np.array([1.0]), {}, "data: expected integers as labels for softmax_cross_entropy, got float64"),
        (np.array([[1.0, 0, 0]]), {}, None), (np.array([1.0]), {"loss": "mean_squared_error"}, None),
        (np.array([[True]]), {}, "data: expected integers as labels for softmax_cross_entropy, got bool"),
    ]
)  # fmt: skip
def test_labels_fit_loss_and_network(case):
    labels, look, expected = case
    made = SimpleNamespace(task=SimpleNamespace(predictor=None))
    if expected is None:
        preflight._labels(Look(**look), made, None, labels)
    else:
        with pytest.raises(ConfigError, match=expected):
            preflight._labels(Look(**look), made, None, labels)


def test_ignored_labels_of_a_classification_are_counted():
    made = SimpleNamespace(task=SimpleNamespace(predictor=None))
    with pytest.warns(UsageWarning, match="1 of the first 4 training labels are -1"):
        preflight._labels(Look(), made, None, np.array([0, 1, 2, -1]))


ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.mark.parametrize(("free", "is_enough"), [(3 * 40 * 4 - 1, False), (3 * 40 * 4, True)])
def test_the_disk_must_have_room_for_the_snapshots_that_are_kept_and_one(monkeypatch, tmp_path, free, is_enough):
    """A snapshot of 10 numbers of 4 bytes has them three times, with the optimizer's states; three are kept."""
    parameter = Parameter(np.zeros(10, np.float32))
    made = SimpleNamespace(task=SimpleNamespace(params=lambda include_uninit: [parameter]))
    settings = SimpleNamespace(out=str(tmp_path / "a" / "b"), snapshot=SimpleNamespace(keep=3))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = list(preflight._disk(settings, ORIGIN, made))
    assert found == ([] if is_enough else [
        f"run.yaml:out: out: 479 bytes are free in {tmp_path}, but 3 snapshots and the next one need about 480; use "
        "another folder, or a smaller snapshot.keep"
    ])  # fmt: skip
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert list(preflight._disk(settings, ORIGIN, made)) == [f"run.yaml:out: out: cannot write to {tmp_path}"]


@each(
    case=[
        ("softmax_cross_entropy", [0, -1, 2], (3, 3), None),
        ("softmax_cross_entropy", [0, -2, 2], (3, 3), "data: a training label is -2; classes are counted from 0, and "
         "-1 is a label to be ignored"),
        ("binary_cross_entropy", [0, -1], (2, 3), "data: a training label is -1; binary_cross_entropy counts classes "
         "from 0"),
        ("binary_cross_entropy", [0, 1], (2,), None), ("hinge", [-1, 2], (2, 3), None),
        ("hinge", [0, 3], (2, 3), "model: the network has 3 outputs, but a training label is 3; labels are counted "
         "from 0, so it needs 4"),
        ("hinge", [0, 3], (2,), None), ("hinge", [], (0, 3), None),
    ]
)  # fmt: skip
def test_the_bounds_of_labels(case):
    loss, labels, outputs, words = case
    made = SimpleNamespace(task=SimpleNamespace(predictor=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UsageWarning)
        if words is None:
            preflight._labels(Look(loss, outputs), made, None, np.array(labels, int))
        else:
            with pytest.raises(ConfigError) as caught:
                preflight._labels(Look(loss, outputs), made, None, np.array(labels, int))
            assert str(caught.value) == words


@each(
    case=[
        (None, [0, 1, 2, -1], "1 of the first 4 training labels are -1"),
        (np.array([-1] * 1200 + [0]), [0, 1, 2, 2], "1,200 of 1,201 training labels are -1"),
        (np.array([0, 1]), [0, 1, 2, -1], None), (None, [0, 1, 2, 0], None),
        (None, [[0, -1], [1, 1], [2, 2], [0, 0]], None),  # of pixels: they are left out on purpose
    ]
)  # fmt: skip
def test_labels_that_are_left_out_of_the_loss_are_counted_in_all_that_is_known(case):
    known, labels, words = case
    look = Look(outputs=(4, 3) + (2,) * (np.ndim(labels) - 1))
    look.dataset = SimpleNamespace(labels=known)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        preflight._labels(look, SimpleNamespace(task=SimpleNamespace(predictor=None)), None, np.array(labels))
    rest = ", which softmax_cross_entropy leaves out of the loss; if -1 is one of your classes, count them from 0"
    assert [str(one.message) for one in seen] == ([] if words is None else [words + rest])


def test_labels_are_looked_for_in_a_dataset_and_in_the_one_that_it_wraps():
    labels, other = np.array([1, 2]), np.zeros(2)
    found = SimpleNamespace(labels=labels), SimpleNamespace(columns=(other, labels))
    for dataset in (*found, SimpleNamespace(_dataset=found[1]), SimpleNamespace(labels=labels, columns=(other, other))):
        (one,) = preflight._labels_of(dataset)
        assert one is labels
    for dataset in (
        SimpleNamespace(), SimpleNamespace(labels=[1, 2]), SimpleNamespace(labels=other),
        SimpleNamespace(labels=labels[None]), SimpleNamespace(columns=(labels,)),
        SimpleNamespace(columns=(other, labels, other)), SimpleNamespace(columns=(labels, other)),
        SimpleNamespace(_dataset=SimpleNamespace()),
    ):  # fmt: skip
        assert preflight._labels_of(dataset) == []


class NotSent:
    def __reduce__(self):
        raise RuntimeError("a lambda")


def test_data_that_cannot_be_sent_to_loaders_is_said_for_each_part():
    data = SimpleNamespace(train=NotSent(), test=[1])
    words = (
        "run.yaml:workers: workers: the {} data cannot be sent to loader processes: a lambda; use functions and "
        "classes of modules, or workers=0"
    )
    asked = SimpleNamespace(workers=2)
    made = SimpleNamespace(data=data)
    assert list(preflight._workers(asked, ORIGIN, made)) == [words.format("training")]
    data.test = NotSent()
    assert list(preflight._workers(asked, ORIGIN, made)) == [words.format("training"), words.format("test")]
    assert list(preflight._workers(SimpleNamespace(workers=0), ORIGIN, made)) == []


def test_each_mistake_is_said_once_and_all_of_them_together(monkeypatch):
    monkeypatch.setattr(preflight, "_parts", lambda *words: iter(["a", "b"]))
    monkeypatch.setattr(preflight, "_workers", lambda *words: iter(["b"]))
    monkeypatch.setattr(preflight, "_disk", lambda *words: iter(["c", "a"]))
    with pytest.raises(ConfigError) as caught:
        preflight.check(None, ORIGIN, None)
    assert str(caught.value) == "a\nb\nc"
    for name in ("_parts", "_workers", "_disk"):
        monkeypatch.setattr(preflight, name, lambda *words: iter([]))
    preflight.check(None, ORIGIN, None)


@each(
    case=[
        (None, None, []), ("validation/main/loss", None, [("snapshot.best", "validation/main/loss")]),
        ("main/loss", "validation/main/f1", [("stop.metric", "validation/main/f1")]),
        ("validation/a", "validation/b", [("snapshot.best", "validation/a"), ("stop.metric", "validation/b")]),
    ]
)  # fmt: skip
def test_values_of_evaluations_that_a_configuration_names(monkeypatch, case):
    best, metric, wanted = case
    settings = SimpleNamespace(
        snapshot=SimpleNamespace(best=best), stop=None if metric is None else SimpleNamespace(metric=metric)
    )
    assert [(".".join(place), key) for place, key in preflight._wanted(settings)] == wanted
    looked, asked = [], []
    monkeypatch.setattr(preflight, "Look", lambda config, origin, part, *more: (part, *more))
    monkeypatch.setattr(preflight, "_look_at", lambda look, made: looked.append(look))
    monkeypatch.setattr(preflight, "_evaluated", lambda look, place, key: asked.append((look[0], place, key)))
    data = SimpleNamespace(train="images", test="others")
    made = SimpleNamespace(data=data, convert="convert", device="device")
    assert list(preflight._parts(settings, ORIGIN, made)) == []
    assert looked == [("train", "images", "convert", "device"), ("test", "others", "convert", "device")]
    assert asked == [("test", place, key) for place, key in wanted]
    data.test = None
    missing = [f"run.yaml:snapshot.best: snapshot.best: there is no test data that {best} could come from"]
    has_best = best is not None and best.startswith("validation/")
    assert list(preflight._parts(settings, ORIGIN, made)) == missing * has_best
    looked.clear()
    preflight.check_test(settings, ORIGIN, made)
    assert looked == [("test", None, "convert", "device")]


def test_what_no_evaluation_reports_is_named_with_what_they_do():
    look = Look()
    look.observed = {"main/loss", "main/accuracy"}
    preflight._evaluated(look, "stop.metric", "validation/main/loss")
    with pytest.raises(ConfigError) as caught:
        preflight._evaluated(look, "stop.metric", "validation/main/los")
    words = "no evaluation reports 'validation/main/los'; it reports validation/main/accuracy, validation/main/loss"
    assert str(caught.value) == f"stop.metric: {words}"
    look.observed = set()
    preflight._evaluated(look, "stop.metric", "validation/main/los")  # not known yet


@each(
    case=[
        (None, ((1, 2), {}), [("labels", 1, 2), ("through", 1, 2)]), (None, None, []),
        (None, ((1,), {}), [("through", 1)]), (None, ((1, 2), {"a": 3}), [("through", 1, 2, 3)]),
        ("none", ((1, 2), {}), [("through", 1, 2)]),
    ]
)  # fmt: skip
def test_a_batch_goes_through_the_whole_task_and_labels_are_looked_at_where_there_are_some(monkeypatch, case):
    loss, arguments, expected = case
    called, asked = [], []
    task = SimpleNamespace(loss="loss" if loss is None else None)

    def through(link, *args, **named):
        assert link is task
        called.append(("through", *args, *named.values()))

    look = SimpleNamespace(arguments=lambda number: asked.append(number) or arguments, through=through)
    monkeypatch.setattr(preflight, "_labels", lambda look, made, *args: called.append(("labels", *args)))
    preflight._look_at(look, SimpleNamespace(task=task))
    assert called == expected and asked == [4]
