"""What people see of a run: the table, the page, predictions, weights."""

import json
import math
import os
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli_helpers import ROOT, lines

import dbrdist
from dbrdist.cli import chart, commands, memory, report
from dbrdist.cli.config import Config
from dbrdist.cli.load import check
from dbrdist.cli.meter import Meter
from dbrdist.core import safetensors
from dbrdist.errors import CheckpointError
from dbrdist.training.extensions.progress_bar import duration

# ---- while it runs ----


def test_the_table_fits_80_columns(run):
    _, out, _ = run("run.yaml", "model=mlp", "log.every=1 iteration", "iterations=3")
    rows = [line for line in out.splitlines() if re.match(r"epoch  step|\d+ +\d+ ", line)]
    assert len(rows) == 4
    assert rows[0].split() == ["epoch", "step", "loss", "accuracy", "test", "loss", "test", "acc", "examples/s", "time"]
    assert all(len(row) <= 80 for row in rows)
    last = lines("result/log.jsonl")[-1]
    assert rows[-1].split()[:3] == ["0", "3", f"{last['main/loss']:.4g}"]


def test_each_line_of_the_log_tells_speed_waiting_memory_and_time(run):
    run("run.yaml", "log.every=1 iteration")
    for entry in lines("result/log.jsonl"):
        assert entry["examples_per_second"] > 0
        assert 0 <= entry["data_wait_fraction"] <= 1
        assert entry["memory_bytes"] > 1 << 20 and "communication_fraction" not in entry
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", entry["time"])
    assert [round(e["epoch_detail"], 6) for e in lines("result/log.jsonl")] == [
        round(k * 100 / 1442, 6) for k in (1, 2, 3)
    ]


def test_the_meter_measures_between_lines():
    class Updater:
        step_seconds = data_seconds = epoch_detail = 0.0

    updater, entry = Updater(), {}
    meter = Meter(1000, updater)
    meter.start()
    updater.step_seconds, updater.data_seconds, updater.epoch_detail = 4.0, 1.0, 0.5
    meter(entry)
    assert (entry["examples_per_second"], entry["data_wait_fraction"]) == (125.0, 0.25)
    assert meter.words(None) == "125 examples/s, 25% waiting for data"
    updater.step_seconds, updater.epoch_detail = 5.0, 2.5
    assert meter.words(None) == "2,000 examples/s"
    meter(entry)
    assert (entry["examples_per_second"], entry["data_wait_fraction"]) == (2000.0, 0.0)
    assert meter.words(None) == "0 examples/s"


def test_the_meter_of_several_ranks_tells_what_communication_took():
    class Updater:
        step_seconds = data_seconds = epoch_detail = exposed_seconds = 0.0

    updater, entry = Updater(), {}
    meter = Meter(1000, updater, optimizer=updater)
    updater.step_seconds, updater.exposed_seconds, updater.epoch_detail = 4.0, 1.5, 0.5
    meter(entry)
    assert entry["communication_fraction"] == 0.375
    updater.step_seconds, updater.exposed_seconds = 5.0, 1.75
    meter(entry)
    assert entry["communication_fraction"] == 0.25
    assert "device_memory_bytes" not in entry


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03")])
def test_durations(seconds, words):
    assert duration(seconds) == words


# ---- the page ----


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 7e-5, None),
        (0, 3e9, None),
    ],
)
def test_ticks_are_round_and_inside(low, high, expected):
    found = chart.ticks(low, high)
    if expected:
        assert found == pytest.approx(expected)
    assert 1 <= len(found) <= 12
    assert all(low - 1e-12 <= t <= high * (1 + 1e-9) for t in found)
    for t in found[1:]:
        mantissa = (t - found[0]) / 10 ** math.floor(math.log10(t - found[0]))
        assert mantissa * 2 == pytest.approx(round(mantissa * 2), abs=1e-6)


def svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_a_run_leaves_its_page(run):
    run("run.yaml", "model=mlp", "log.every=1 iteration", "iterations=6", "out=<here & there>")
    page = Path("<here & there>/report/index.html").read_text()
    drawn = svgs(page)
    assert [svg.get("aria-label") for svg in drawn][:4] == ["Loss", "Accuracy", "Learning rate", "Examples per second"]
    path = next(p for p in drawn[0] if p.get("class") == "line" and "L" in p.get("d"))
    points = [tuple(map(float, point.split())) for point in path.get("d")[1:].split("L")]
    losses = [entry["main/loss"] for entry in lines("<here & there>/log.jsonl")]
    assert len(points) == 6
    assert np.corrcoef([y for _, y in points], losses)[0, 1] == pytest.approx(-1, abs=1e-4)  # up on paper is less
    assert np.diff([x for x, _ in points]) == pytest.approx(np.full(5, (points[-1][0] - points[0][0]) / 5), abs=0.2)
    assert "&lt;here &amp; there&gt;" in page and "<here" not in page
    assert "finished" in page and "momentum_sgd" in page and "test accuracy" in page
    assert not re.search(r'(src|href)="?(http|//)', page)  # nothing is fetched


@pytest.mark.slow
def test_a_report_is_made_again_for_one_or_several(run):
    for out, lr in (("a", 0.05), ("b", 0.1)):
        run("run.yaml", "model=mlp", "log.every=1 iteration", f"out={out}", f"optimizer.lr={lr}")
    before = Path("a/report/index.html").read_text()
    os.remove("a/report/index.html")
    code, out, _ = run("--report", "a")
    assert code == 0 and out.splitlines()[0] == "a/report/index.html"
    assert Path("a/report/index.html").read_text() == before
    code, out, _ = run("--report", "a", "b")
    assert out.splitlines()[0] == "a/report/compare.html"
    page = Path("a/report/compare.html").read_text()
    assert "lr: 0.05" in page and "lr: 0.1" in page and "batch: 100" not in page
    assert "a training" in page and "b test" in page


def test_pictures_are_drawn_where_matplotlib_is(run):
    run("run.yaml", "log.every=1 iteration")
    code, out, _ = run("--report", "result")
    assert code == 0
    names = [Path(line).name for line in out.splitlines()[1:]]
    if "no PNG" in out:
        pytest.skip("matplotlib is not installed; the report says so")
    assert {"loss.png", "learning_rate.png"} <= set(names)
    assert Path("result/report/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "log",
    ["", "{", '{"main/loss": null}\n', '[1]\n{"main/loss": 2}\n', '{"main/loss": "x", "epoch": 1}\n{"main/loss": 3}\n'],
)
def test_a_page_of_any_log(tmp_path, log):
    (tmp_path / "log.jsonl").write_text(log)
    (tmp_path / "summary.json").write_text('{"status": "running", "hosts": [1], "seconds_over_all_starts": NaN}')
    (path,) = report.write([str(tmp_path)])
    assert "failed" in Path(path).read_text()  # it says that it runs, but nobody holds the folder


def test_nothing_to_report(run):
    code, _, err = run("--report", "nowhere")
    assert code == 2 and "nowhere: expected the folder of a run" in err


# ---- predictions ----


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
    shares = [float(x) for x in re.findall(r"([\d.]+)%", found[0])]
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


def test_runs_and_files_that_are_not_there_are_a_sentence(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    for words, code, expected in [
        (("--predict", "nowhere", "x.png"), 2, "nowhere: expected the folder of a run, or a snapshot in one"),
        (("--predict", "run.yaml", "x.png"), 2, "run.yaml: the snapshot is damaged"),
        (("--export", "nowhere", "x.safetensors"), 2, "nowhere: expected the folder of a run, or a snapshot in one"),
        (("--export", ".", "x.safetensors"), 2, ".: expected a snapshot in it"),
        (("--export", "result", "nowhere/x.safetensors"), 2, "nowhere/x.safetensors: No such file or directory"),
        (("--export", "result", "result"), 2, "expected one file to write"),
        (("--report", "nowhere"), 2, "nowhere: expected the folder of a run"),
        (("--audit", "nowhere"), 2, "nowhere/audit: expected the files of an audit"),
        (("--evaluate", "nowhere"), 2, "nowhere/config.yaml: the configuration cannot be read"),
    ]:
        got, _, err = run(*words)
        assert (got, expected in err, "Traceback" in err) == (code, True, False), (words, got, err)


def test_a_full_disk_is_said_with_the_file(run, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    run("run.yaml", "model=mlp", "transforms.train=[]")
    monkeypatch.setattr(commands.weights, "export", full)
    monkeypatch.setattr(commands.report, "write", full)
    for words in (("--export", "result", "x.safetensors"), ("--report", "result")):
        code, _, err = run(*words)
        assert (code, err) == (2, f"dbrdist-train: {words[-1]}: No space left on device\n")


def test_predictions_need_classes_with_names(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    code, _, err = run("--predict", "result", "x.png")
    assert code == 2 and "this run has no named classes" in err


# ---- weights ----


def test_weights_are_exported(run):
    run("run.yaml")
    code, out, err = run("--export", "result", "out.safetensors")
    assert code == 0, err
    assert "out.safetensors: " in out and "from result/snapshot_iter_3" in out
    net = dbrdist.load("result", model=sys.modules["usernet"].Net)
    found = safetensors.load("out.safetensors")
    for path, p in net.namedparams():
        assert np.array_equal(found[path.strip("/").replace("/", ".")], p.array)
    assert np.array_equal(found["bn.avg_mean"], net.bn.avg_mean)
    code, _, err = run("--export", "result", "out.txt")
    assert code == 2 and "expected one file to write" in err


def test_the_format_byte_for_byte(tmp_path):
    """Against the layout of its specification, read by hand."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"b": a, "a": np.array(7, np.int64), "c": a.T.astype(ml_dtypes.bfloat16), "d": np.zeros((0, 2), np.uint8)}
    path = str(tmp_path / "x")
    safetensors.save(path, arrays, {"k": "v"})
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"] == {"k": "v"} and (8 + length) % 8 == 0
    assert header["b"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}
    assert header["c"]["dtype"] == "BF16" and header["a"]["shape"] == []
    start, end = header["b"]["data_offsets"]
    assert data[8 + length :][start:end] == a.tobytes()
    assert len(data) == 8 + length + 8 + 24 + 12
    back = safetensors.load(path)
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and np.array_equal(back[name], array)


def test_damaged_weights_are_refused(tmp_path):
    path, rng = tmp_path / "x", np.random.default_rng(0)
    safetensors.save(str(path), {"a": np.arange(10.0)})
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(3):
            data[rng.integers(90)] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.3 else data)
        try:
            assert all(isinstance(a, np.ndarray) for a in safetensors.load(str(path)).values())
        except CheckpointError as error:
            assert "cannot be read as a safetensors file" in str(error)


# ---- other options ----


def test_version(run):
    assert run("--version")[:2] == (0, f"dbrdist {dbrdist.__version__}\n")
    assert run("--version", "--init", "digits")[0] == 2


@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_init_prints_a_commented_configuration(run, name):
    code, out, _ = run("--init", name)
    assert code == 0
    assert "#" in out
    assert isinstance(check(out.encode(), "x.yaml")[0], Config)
    assert out == (ROOT / "examples" / name / "config.yaml").read_text()
    code, _, err = run("--init", "nothing")
    assert code == 2 and "(digits, cifar10, imagenet), got 'nothing'" in err


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, None), (None, 7, None), (1 << 70, 7, None), (900, 300, 600), (900, None, None), (300, 900, 0)],
)
def test_free_memory_is_that_of_the_container_where_it_has_a_limit(monkeypatch, limit, used, expected):
    """The lesser of what the host and the container have left, and the host's where the container says nothing."""
    numbers = {"/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": used}
    monkeypatch.setattr(memory, "_number", numbers.__getitem__)
    free = memory.free_bytes()
    assert free == expected if expected is not None else free > 1 << 20
