"""What lies just within and just outside of the numbers and lengths by which the command line decides and writes."""

from __future__ import annotations

import math
import pathlib
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from test_config import GOOD, config, errors

from dbrdist import Link, Reporter, Variable
from dbrdist.cli import (
    assemble,
    chart,
    data,
    folder,
    load,
    memory,
    meter,
    predict,
    preflight,
    report,
    resume,
    words,
)
from dbrdist.cli.config import number_at
from dbrdist.cli.task import Task
from dbrdist.errors import ConfigError
from dbrdist.functions import softmax_cross_entropy
from tests.each import each

# ---- words and numbers ----------------------------------------------------------------------------------------------


@each(n=[59, 60, 61])
def test_long_values_are_cut(n):
    quoted = "a" * (n - 2)
    text = load._shown(quoted)
    assert text == (f"'{quoted}'" if n <= 60 else "'" + "a" * 56 + "...")
    plain = "a" * n
    assert resume.shown(plain) == (plain if n <= 60 else "a" * 57 + "...")
    assert load._shown(None) == resume.shown(None) == "nothing"


@each(n=[words.WIDTH - 1, words.WIDTH, words.WIDTH + 1])
def test_lines_are_folded_beyond_a_width(n):
    line = "  " + "ab " * 20
    line += "c" * (n - len(line))
    folded = words.folded(line)
    assert (folded == line) == (n <= words.WIDTH)
    if n > words.WIDTH:
        first, second = folded.splitlines()
        assert len(first) <= words.WIDTH and second.startswith("    c")


def test_what_errors_say():
    for error, said in (
        (OSError(2, "no such file", "x"), "x: no such file"), (OSError(2, "no such file"), "no such file"),
        (OSError("[Errno 5] words"), "words"), (KeyError("key"), "key"), (ValueError("v"), "v"),
    ):  # fmt: skip
        assert words.said(error) == said
    assert [words.counted(n, "rank") for n in (0, 1, "1", 2)] == ["0 ranks", "1 rank", "1 rank", "2 ranks"]
    assert folder._reason(OSError(2, "no")) == "no" and folder._reason(OSError("w")) == "w" == folder._reason(
        ValueError("w")
    )


@each(
    case=[
        (None, ""), (True, "True"), (12345, "12,345"), (999.94, "999.9"), (1000.0, "1,000"), (-999.9, "-999.9"),
        (-1234.5, "-1,234"), (0.123456, "0.1235"), ({"a": 1, "b": 2}, "a 1, b 2"), ("x", "x"),
    ]
)  # fmt: skip
def test_cells_of_a_report(case):
    assert report._shown(case[0]) == case[1]


@each(
    case=[
        (0, "1 kB"), (500, "1 kB"), (1000, "1 kB"), (999_400, "999 kB"), (999_500, "1 MB"), (1e6, "1 MB"),
        (999.4e6, "999 MB"), (999.5e6, "0.999 GB"), (12.34e9, "12.3 GB"),
    ]
)  # fmt: skip
def test_sizes_of_memory(case):
    assert memory._size(case[0]) == case[1].replace("0.999 GB", f"{999.5e6 / 1e9:.3g} GB")


def test_sizes_and_names_of_data():
    assert data._size(999_999) == "999,999 bytes" and data._size(1_000_000) == "1.0 MB"
    assert data._some(list("abcd")) == "a, b, c, d" and data._some(list("abcde")) == "a, b, c, ..., e"
    assert [data._counted(n, noun) for n, noun in ((1, "class"), (2, "class"), (0, "image"), (1, "image"))] == [
        "1 class", "2 classes", "0 images", "1 image"
    ]  # fmt: skip


def test_progress_over_data_is_said_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(data.time, "monotonic", lambda: now[0])
    progress = data._Progress()
    for now[0], done in (
        (data._SECONDS - 0.5, 1),
        (data._SECONDS, 2),
        (data._SECONDS + 0.5, 3),
        (2 * data._SECONDS, 4),
    ):
        progress(done, 8)
    rests = [data._SECONDS * (8 - 2) / 2, 2 * data._SECONDS * (8 - 4) / 4]
    assert capsys.readouterr().err.splitlines() == [
        f"{done} of 8 images, {rest:,.0f} s left" for done, rest in zip((2, 4), rests)
    ]


def test_ticks_are_round_numbers_within_the_bounds():
    for low, high, expected in (
        (0, 10, [0, 2, 4, 6, 8, 10]), (0, 5, [0, 1, 2, 3, 4, 5]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 25, [0, 5, 10, 15, 20, 25]), (3, 3, [3]), (3, 2, [3]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (0, 6, [0, 2, 4, 6]),
        (1, 49, [10, 20, 30, 40]),
    ):  # fmt: skip
        np.testing.assert_allclose(chart.ticks(low, high), expected, atol=1e-12)
    for value, text in (
        (0, "0"), (0.001, "0.001"), (0.00099, "9.9e-4"), (1e5, "1e5"), (99999, "99999"), (-0.5, "-0.5"), (-2e6, "-2e6"),
    ):  # fmt: skip
        assert chart.label(value) == text
    assert chart.chart("t", "x", []) == "" == chart.chart("t", "x", [chart.Series("a", [], "red")])
    one = chart.chart("t", "x", [chart.Series("a", [(0, 1)], "red"), chart.Series("b", [], "blue", True)])
    assert "red" in one and "blue" not in one and "stroke-dasharray" not in one
    assert "stroke-dasharray" in chart.chart("t", "x", [chart.Series("a", [(0, 1), (1, 2)], "red", dashed=True)])
    for name, count in (("alone", 1), ("", 0)):  # one line without a name needs no legend, one with a name has it
        made = chart.chart("t", "x", [chart.Series(name, [(0, 1), (1, 2)], "red")])
        assert made.count('y="18" class="tick"') == count


def test_the_likeliest_classes():
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.15, 0.1, 0.15]))
    text = predict._likeliest(scores, ["a", "b", "c", "d", "e"])
    best = np.argsort(-np.exp(scores), kind="stable")[:3]
    assert text == ", ".join(f"{'abcde5'[k]} {np.exp(scores[k]):.1%}" for k in best)
    assert predict._likeliest(np.zeros(2), ["a"]).split(", ") == ["a 50.0%", "1 50.0%"]


@each(n=[0, 1, 4, 5])
def test_a_file_is_overwritten_where_its_room_suffices(n):
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place, "x")
        path.write_bytes(b"abcd")
        assert folder._overwrite(str(path), b"z" * n) == (n <= 4)
        assert path.read_bytes() == (b"z" * n).ljust(4) if n <= 4 else b"abcd"
        assert not folder._overwrite(str(path) + "none", b"")


# ---- memory ---------------------------------------------------------------------------------------------------------


@each(free=[None, 7_999_999, 8_000_000])
def test_the_plan_says_where_memory_does_not_suffice(free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: free)
        need, plan = SimpleNamespace(of=lambda n: 4e6 if n == 8 else math.nan), config(GOOD.replace("64", "16"))
        (line,) = memory.sentence(need, plan, 2, 2)
        assert memory.sentence(None, plan, 2, 2) == []
        (alone,) = memory.sentence(SimpleNamespace(of=lambda n: 4e6), plan, 1, 1)
    few, more = memory.NUM_EXAMPLES
    said = f"memory: about 4 MB per step and rank, from {few} and {more} examples"
    if free is None:
        assert line == said == alone
    else:
        assert line.startswith(f"{said}; 8 MB free here for 2 ranks") and alone == f"{said}; 8 MB free here"
        assert line.endswith(": not enough; use a smaller batch, or fewer ranks on a host") == (free < 8_000_000)


@each(speed=[None, 10.0], waited=[0.0, 0.004, 0.005, 0.5])
def test_a_meter_names_waiting_that_is_any(speed, waited):
    own = SimpleNamespace(_at_look=(0.0,) * 4, _position=lambda: (1.0,) * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "_speed", lambda before, after: (speed, waited, 0.0))
        text = meter.Meter.words(own, None)
    more = f", {waited:.0%} waiting for data" if waited >= 0.005 else ""
    assert text == ("0 examples/s" if speed is None else f"10 examples/s{more}")


# ---- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs=1e-8", None),
        ("epochs=9e-9", "epochs: 9e-09 epochs are less than one step"),
        (f"batch={2**31 - 1}", None),
        (f"batch={{virtual_workers: 1, per_worker: {2**31 - 1}}}", None),
        (
            f"batch={{virtual_workers: 2, per_worker: {2**30}}}",
            "2,147,483,648 examples per step are more than 2,147,483,647",
        ),
        ("loss_scale=3e38", None),
        ("optimizer.schedule={name: cosine, warmup_epochs: 3}", None),
        (
            "optimizer.schedule={name: cosine, warmup_epochs: 3.1}",
            "a warm-up of 3.1 epochs is longer than the run of 3",
        ),
    ],
)
def test_numbers_that_a_run_may_have(override, expected):
    key = override.partition("=")[0]
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith(f"{key}:")) + "\n"
    if expected is None:
        config(text, override)
    else:
        assert any(expected in line for line in errors(text, override))


@each(dtype=["mixed16", "float16", "mixedbf16", "float32"])
def test_the_largest_loss_scale_is_the_types(dtype):
    largest = 65504 if dtype in ("mixed16", "float16") else 3e38
    config(GOOD, f"dtype={dtype}", f"loss_scale={largest}")
    assert any("takes at most" in line for line in errors(GOOD, f"dtype={dtype}", f"loss_scale={largest * 1.01}"))


def test_numbers_by_dotted_keys():
    own = config(GOOD)
    assert number_at(own, "epochs") == 3.0 and number_at(own, "nothing") is None and number_at(own, "model") is None
    assert number_at(own, "reproducible") is None
    assert number_at((1, 2.5), "1") == 2.5 and number_at((1, 2.5), "2") is None and number_at((1,), "x") is None
    assert number_at({"a": {"b": 4}}, "a.b") == 4 and number_at({"a": 1}, "b") is None and number_at(3, "a") is None


@each(
    case=[
        (None, 64, 64, None), (None, 64, 65, "64 examples for 65 ranks: every rank needs one"),
        (None, 63, 64, "63 "), (4, 1, 4, None), (4, 99, 5, "4 for 5 ranks: every rank needs one"),
    ]
)  # fmt: skip
def test_every_rank_needs_an_example(case):
    num_workers, num_examples, size, expected = case
    text = GOOD if num_workers is None else GOOD.replace("64", f"{{virtual_workers: {num_workers}, per_worker: 16}}")
    own = config(text)
    origin = SimpleNamespace(where=lambda path: "run.yaml:1:1")
    if expected is None:
        assemble.check_sizes(own, origin, num_examples, size)
    else:
        with pytest.raises(ConfigError, match=expected):
            assemble.check_sizes(own, origin, num_examples, size)


# ---- labels ---------------------------------------------------------------------------------------------------------


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
        (np.array([0, 1, 2, -1]), {}, None),
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


class Identity(Link):
    def forward(self, x):
        return x


def without_loss(outputs, labels):
    return Variable(np.zeros(()))


@each(
    case=[
        ((4, 3), np.zeros(4, int), without_loss, True), ((4, 3), np.zeros((4, 3), int), without_loss, False),
        ((4, 3, 2), np.zeros((4, 2), int), without_loss, True), ((4,), np.zeros(4, int), without_loss, False),
        ((4, 3), np.full((4, 3), 1 / 3, "f"), softmax_cross_entropy, True),
        ((4, 3), np.full((4, 3), 1 / 3, "f"), without_loss, False), ((4,), np.zeros(4, "f"), without_loss, False),
    ]
)  # fmt: skip
def test_an_accuracy_needs_classes(case):
    outputs, labels, loss, expected = case
    own, reporter = Task(Identity(), loss), Reporter()
    reporter.add_observer("main", own)
    with reporter:
        own(np.zeros(outputs, "f"), labels)
    assert ("main/accuracy" in reporter.observation) is expected
