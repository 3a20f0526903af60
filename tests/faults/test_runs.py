"""Runs of dbrdist-train, their folders and their data: what earlier versions said or kept though it was not so."""

from __future__ import annotations

import json
import math
import re
import subprocess
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dbrdist import serializers
from dbrdist.training import triggers

pytestmark = pytest.mark.programs

DIGITS = "model: {name: mlp, units: [6]}\ndata: digits\nbatch: 100\nepochs: 1\nout: run\n"
FOLDERS = """\
model: {name: mlp, units: [6]}
data: {name: image_folder, root: images}
transforms: {train: [{name: normalize, mean: [0.5], std: [0.25]}], test: [{name: normalize, mean: [0.5], std: [0.25]}]}
batch: 9
epochs: 2
optimizer: {lr: 0.05}
out: run
"""
NAMES = ("ash", "blood", "clay")


def train(start, *words, **options):
    return start("dbrdist-train", *words, **options)


def run(start, text, *words):
    """A run that must succeed; what it said."""
    start.file("run.yaml", text)
    code, said = train(start, "run.yaml", *words)
    assert code == 0, said
    return said


def log(start):
    return [json.loads(line) for line in (start.folder / "run" / "log.jsonl").read_text().splitlines()]


def strict(text):
    """JSON as jq and JavaScript read it."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def images(start, names=NAMES, size=8):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for k, name in enumerate(names):
            folder = start.folder / "images" / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(3):
                pixels = np.full((size, size, 3), 40 + 60 * k) + rng.integers(0, 9, (size, size, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


# ---- what is saved carries the name of what it describes


def test_the_best_value_of_one_metric_is_not_that_of_another(start):
    run(start, DIGITS, "snapshot.best=validation/main/loss")
    words = ["--resume", "epochs=4", "snapshot.best=validation/main/accuracy", "optimizer.lr=0.2"]
    assert train(start, "run.yaml", *words)[0] == 0
    best = max(log(start)[1:], key=lambda entry: entry["validation/main/accuracy"])
    assert int(np.load(start.folder / "run" / "snapshot_best")["updater/iteration"]) == best["iteration"]


def fired(trigger, name, values, first=1):
    """At which steps a trigger fires that looks at one reported value in each."""
    found = []
    for step, value in enumerate(values, first):
        updater = SimpleNamespace(iteration=step, epoch=0, epoch_detail=0.0, previous_epoch_detail=0.0)
        trainer = SimpleNamespace(updater=updater, observation={name: value}, is_before_training=False)
        found.append(bool(trigger(trainer)))
    return found


def test_a_trigger_of_another_metric_does_not_go_on_with_the_saved_value(tmp_path):
    before = triggers.MaxValueTrigger("loss", (1, "iteration"))
    assert fired(before, "loss", [1.8]) == [True]
    serializers.save_npz(tmp_path / "state.npz", before)
    after = triggers.MaxValueTrigger("accuracy", (1, "iteration"))
    serializers.load_npz(tmp_path / "state.npz", after)
    assert fired(after, "accuracy", [0.5, 0.4, 0.9], 2) == [True, False, True]


def test_nan_is_never_the_best():
    trigger = triggers.MinValueTrigger("x", (1, "iteration"))
    assert fired(trigger, "x", [np.nan, 3.0, 2.0, 2.5, 1.0])[1:] == [True, True, False, True]


def test_classes_are_those_that_the_network_has_learned(start):
    """Folders that were renamed give classes other numbers: refused, and the run's own list stays."""
    images(start)
    run(start, FOLDERS)
    before = (start.folder / "run" / "model.json").read_text()
    for part in ("train", "test"):
        (start.folder / "images" / part / "blood").rename(start.folder / "images" / part / "zinc")
    for words in (["run.yaml", "--resume", "epochs=3"], ["--evaluate", "run"]):
        code, text = train(start, *words)
        assert code != 0 and "blood" in text and (start.folder / "run" / "model.json").read_text() == before, text


def test_a_prediction_is_preprocessed_as_the_training_was(start):
    """A run without test data: it names the classes of its own training images."""
    images(start)
    text = FOLDERS.replace("root: images", "root: images, test: null")
    text = text.replace(", test: [{name: normalize, mean: [0.5], std: [0.25]}]", "")
    run(start, text.replace("[6]", "[]"), "epochs=80", "optimizer.lr=0.02", "seed=1")
    assert log(start)[-1]["main/accuracy"] == 1
    paths = [f"images/train/{name}/{i}.png" for name in NAMES for i in range(3)]
    _, text = train(start, "--predict", "run", *paths)
    assert all(f"{path}: {path.split('/')[2]} " in text for path in paths), text


NORMALIZED = """\
import dbrdist
import dbrdist.links as L


class Net(dbrdist.Chain):
    def __init__(self, eps=1e-3):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(64, 10)
            self.bn = L.BatchNormalization(10, eps=eps)

    def forward(self, x):
        return self.bn(self.fc(x.reshape(len(x), -1)))
"""


def test_the_constants_of_weights_travel_with_them(start):
    """From a file of weights and from a run's folder."""
    start.file("ownnet.py", NORMALIZED)
    run(start, DIGITS.replace("{name: mlp, units: [6]}", "{name: 'ownnet:Net', args: {eps: 0.3}}"), "iterations=1")
    assert train(start, "--export", "run", "w.safetensors")[0] == 0
    sources = ["w.safetensors", "run"]
    for out, source in enumerate(sources):
        words = [f"out=next{out}", f"init_from={source}", "model.args.eps=1e-3", "iterations=1", "optimizer.lr=1e-9"]
        assert train(start, "run.yaml", *words)[0] == 0
    _, text = start.python(
        "import dbrdist, ownnet\n"
        "print('eps', *(dbrdist.load(f'next{k}', model=ownnet.Net(eps=1e-3)).bn.eps for k in range(2)))\n"
    )
    assert "eps 0.3 0.3" in text, text


def of_torchvision():
    """Names and shapes of the weights of its ResNet-50, with three classes."""

    def layer(conv, bn, shape):
        yield f"{conv}.weight", shape
        for name in ("weight", "bias", "running_mean", "running_var"):
            yield f"{bn}.{name}", shape[:1]

    yield from layer("conv1", "bn1", (64, 3, 7, 7))
    size = 64
    for number, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for k in range(count):
            place = f"layer{number}.{k}"
            if k == 0:
                yield from layer(f"{place}.downsample.0", f"{place}.downsample.1", (4 * width, size, 1, 1))
            yield from layer(f"{place}.conv1", f"{place}.bn1", (width, size, 1, 1))
            yield from layer(f"{place}.conv2", f"{place}.bn2", (width, width, 3, 3))
            yield from layer(f"{place}.conv3", f"{place}.bn3", (4 * width, width, 1, 1))
            size = 4 * width
    yield from (("fc.weight", (3, size)), ("fc.bias", (3,)))


def test_weights_of_torchvision_compute_what_they_compute_there(start):
    """Its batch normalizations add 1e-5 to the variances, ours 2e-5 by default."""
    head, end = {}, 0
    for name, shape in of_torchvision():
        begin, end = end, end + 4 * math.prod(shape)
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(head).encode()
    content = np.full(end // 4, 0.01, np.float32).tobytes()
    (start.folder / "tv.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + content)
    images(start, size=32)
    text = "model: resnet50\ndata: {name: image_folder, root: images, test: null}\nbatch: 3\nepochs: 1\nout: run\n"
    run(start, text + "optimizer: {name: sgd, lr: 1.0e-9}\ninit_from: tv.safetensors\n", "iterations=1")
    program = (
        "import dbrdist, dbrdist.links as L\n"
        "print('eps', {x.eps for x in dbrdist.load('run').links() if isinstance(x, L.BatchNormalization)})\n"
    )
    _, text = start.python(program)
    assert "eps {1e-05}" in text, text


# ---- what is written is read as it was


def test_a_folder_named_like_a_number_is_found_again(start):
    run(start, DIGITS, "out=1e-3", "iterations=1")
    code, text = train(start, "--evaluate", "./1e-3")
    assert code == 0 and "validation" in text, text


def test_texts_of_a_configuration_stay_texts(start):
    start.file(
        "own.py",
        "import dbrdist.links as L\ndef net(tag):\n    assert tag == '1e3', tag\n    return L.Linear(64, 10)\n",
    )
    text = DIGITS.replace("{name: mlp, units: [6]}", "{name: 'own:net', args: {tag: \"1e3\"}}")
    start.file("flat.py", "from dbrdist.datasets import get_digits\ndef data():\n    return get_digits(ndim=1)\n")
    run(start, text.replace("data: digits", "data: 'flat:data'"))
    code, text = train(start, "run.yaml", "--resume", "epochs=2")
    assert code == 0 and text.count(" is now ") <= 1, text
    code, text = train(start, "run/config.yaml", "out=again")
    assert code == 0, text


METRICS = "def endless(y, t):\n    return float('inf')\n\n\ndef none(y, t):\n    return float('nan')\n"


def test_all_json_of_a_run_is_json(start):
    start.file("odd.py", METRICS)
    run(start, DIGITS + "metrics: ['odd:endless', 'odd:none']\n")
    strict((start.folder / "run" / "summary.json").read_text())
    code, text = start("sh", "-c", "dbrdist-train run.yaml --evaluate run 2>/dev/null")
    assert code == 0 and "endless" in str(strict(text))


# ---- the report


def page(start, entries, *others):
    """The page of a run whose log was replaced."""
    run(start, DIGITS, "iterations=1")
    for name, lines in (("run", entries), *others):
        if name != "run":
            subprocess.run(["cp", "-r", start.folder / "run", start.folder / name], check=True)
        text = "".join(json.dumps(entry) + "\n" for entry in lines)
        (start.folder / name / "log.jsonl").write_text(text)
    code, text = train(start, "--report", "run", *(name for name, _ in others))
    assert code == 0, text
    places = [start.folder / word.strip("'\",.") for word in text.split() if word.strip("'\",.").endswith(".html")]
    return (places or sorted(start.folder.rglob("index.html")))[0].read_text()


def entries(values, **more):
    return [{"epoch_detail": k / 10, "iteration": k, "main/loss": v, **more} for k, v in enumerate(values, 1)]


def test_charts_keep_extremes(start):
    """Of 5,000 losses one is 900: the highest point of the curve stands far from the others."""
    values = [1.0 + k % 2 / 10 for k in range(5000)]
    values[1733] = 900.0
    first = re.search(r"<svg.*?</svg>", page(start, entries(values)), re.S).group()
    heights = [float(y) for d in re.findall(r' d="M([^"]*L[^"]*)"', first) for y in re.findall(r"[\d.]+ ([\d.]+)", d)]
    assert heights and min(heights) < np.median(heights) - 50 and ">800<" in first, first[:3000]


def test_charts_show_metrics_of_ones_own(start):
    assert ">own<" in page(start, entries([1.0, 2.0, 1.5], **{"main/own": 3.0}))


def test_charts_of_twelve_runs_stay_readable(start):
    """No word runs out of the picture, and each run has a colour of its own."""
    names = [f"lr0.8_batch2048_seed{k}" for k in range(12)]
    text = page(start, entries([1.0, 2.0]), *((name, entries([1.0, 2.0 + len(name)])) for name in names))
    assert min(float(x) for x in re.findall(r'<text x="([-\d.]+)"', text)) >= 0
    first = re.search(r"<svg.*?</svg>", text, re.S).group()
    assert len(set(re.findall(r'stroke="([^"]+)"', first))) >= 12


# ---- streams, signals and readers


@pytest.mark.parametrize("into", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full", ">/dev/full 2>&1"])
def test_streams_that_cannot_be_written_do_not_end_a_run(start, into):
    start.file("run.yaml", DIGITS)
    code, _ = start("bash", "-c", f"dbrdist-train run.yaml {into}")
    record = start.folder / "run" / "summary.json"
    assert code == 0 and record.exists() and strict(record.read_text())["status"] == "finished", code


@pytest.mark.parametrize("starter", [[], ["mpiexec", "-n", "2"]], ids=["one rank", "two ranks"])
def test_an_interrupt_during_the_imports_is_one_line_and_130(start, starter):
    """NumPy's stand-in interrupts the program that imports it."""
    stand_in = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
    start.file("stand_in/numpy/__init__.py", stand_in)
    start.file("run.yaml", DIGITS)
    code, text = start(*starter, "dbrdist-train", "run.yaml", PYTHONPATH=str(start.folder / "stand_in"))
    assert code == 130 and len(text.splitlines()) <= (2 if starter else 1), (code, text)


READS = """
import os, sys
import dbrdist

gone = []
def moves(event, given):
    if event == "open" and isinstance(given[0], str) and "snapshot_iter_" in given[0] and not gone:
        gone.append(given[0])
        os.rename(given[0], given[0].rpartition("_")[0] + "_99")

sys.addaudithook(moves)
try:
    print("loaded", dbrdist.load("run") is not None, bool(gone))
except Exception as error:
    print(repr(error))
"""


def test_a_run_can_be_read_while_it_saves(start):
    """The newest snapshot has gone when it is opened, since the run has saved the next."""
    run(start, DIGITS)
    _, text = start.python(READS)
    assert "loaded True True" in text, text


# ---- data


@pytest.mark.parametrize("corrupt", ["fail", "skip"])
def test_an_image_that_a_transform_would_make_huge_is_corrupt(start, corrupt):
    """One of 1 x 60,000 pixels, resized to a height of 256, has four billion."""
    images(start)
    Image.new("RGB", (60_000, 1)).save(start.folder / "images/train/ash/thin.png")
    text = FOLDERS.replace("train: [", "train: [{name: resize, size: 256}, {name: center_crop, size: 8}, ")
    start.file("run.yaml", text.replace("root: images", f"root: images, corrupt: {corrupt}"))
    code, text = start("bash", "-c", "ulimit -v 6000000; dbrdist-train run.yaml")
    assert code == (0 if corrupt == "skip" else 2) and ("corrupt" in text or "thin.png" in text), (code, text)


def test_an_empty_test_set_is_a_sentence(start):
    start.file("own.py", "import numpy as np\ndef data():\n    return [(np.ones(4, 'f'), np.int32(0))] * 20, []\n")
    text = DIGITS.replace("[6]}", "[6], num_classes: 3}").replace("digits", "'own:data'").replace("100", "10")
    start.file("run.yaml", text)
    code, text = train(start, "run.yaml")
    assert code == 2 and "Traceback" not in text, text


def test_images_of_bytes_need_no_transform(start):
    rng = np.random.default_rng(0)
    np.savez(start.folder / "a.npz", x=rng.integers(0, 255, (20, 3, 4, 4), np.uint8), y=np.arange(20) % 3)
    start.file("run.yaml", DIGITS.replace("digits", "{name: npz, train: a.npz}").replace("100", "10"))
    code, text = train(start, "run.yaml")
    assert code == 0, text


def test_a_file_that_claims_more_than_it_has_is_a_sentence(start):
    np.savez(start.folder / "a.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int32))
    with zipfile.ZipFile(start.folder / "a.npz") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["x.npy"] = parts["x.npy"].replace(b"(4, 2), }            ", b"(9000000000000, 2), }")
    with zipfile.ZipFile(start.folder / "a.npz", "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    start.file("run.yaml", DIGITS.replace("digits", "{name: npz, train: a.npz}").replace("100", "2"))
    code, text = train(start, "run.yaml", "--dry-run")
    assert code == 2 and "Traceback" not in text and "a.npz" in text, text


def test_files_that_are_not_read_are_counted(start):
    images(start)
    for name in ("a.webp", "b.bmp", "below/c.png"):
        path = start.folder / "images" / "train" / "ash" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    _, text = start("dbrdist-data", "info", "images/train")
    assert re.search(
        r"\b(2|3)\b.*(ignored|not read|left out|skipped)|(ignored|not read|left out|skipped).*\b(2|3)\b", text
    ), text


# ---- configurations


def types(schema, node):
    """Types that a part of a JSON schema allows."""
    if "$ref" in node:
        node = {**node, **schema["$defs"][node["$ref"].rpartition("/")[2]]}
    found = {node["type"]} if isinstance(node.get("type"), str) else {*node.get("type", ())}
    for part in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        found |= types(schema, part)
    return found


def required(schema, node):
    """What each object that a part of a JSON schema allows must have."""
    if "$ref" in node:
        node = {**node, **schema["$defs"][node["$ref"].rpartition("/")[2]]}
    parts = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    return [{*node.get("required", ())}] * ("properties" in node) + [r for p in parts for r in required(schema, p)]


def test_the_schema_takes_what_the_command_takes(start):
    """An average as a number, and an optimizer without its name."""
    _, text = train(start, "--print-schema")
    schema = json.loads(text)
    assert "number" in types(schema, schema["properties"]["ema"])
    assert any("name" not in found for found in required(schema, schema["properties"]["optimizer"]))


def test_a_resumed_run_records_what_it_uses(start):
    """A number whose schedule was taken away is the one in config.yaml again, not the schedule's last."""
    schedule = "schedules=[{of: optimizer.momentum, schedule: {name: polynomial, end: 0.1}}]"
    run(start, DIGITS + "optimizer: {name: momentum_sgd, lr: 0.05, momentum: 0.9}\n", schedule)
    assert train(start, "run.yaml", "--resume", "epochs=2")[0] == 0
    used = float(np.load(start.folder / "run" / "snapshot_iter_30")["updater/optimizer:main/hyperparam/momentum"])
    assert f"momentum: {used}\n" in (start.folder / "run" / "config.yaml").read_text(), used


def test_batches_left_over_by_accumulation_are_said(start):
    text = run(start, DIGITS, "accumulate=4")  # of 15
    assert re.search(r"3 batches|left over", text), text


def test_snapshots_are_written_in_the_background_on_request(start):
    text = DIGITS + "snapshot: {every: 1 epoch, background: true}\n"
    start.file("run.yaml", text)
    code, text = train(start, "run.yaml")
    assert code == 0 and (start.folder / "run" / "snapshot_iter_15").exists(), text
