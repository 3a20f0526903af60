"""What a run keeps of itself and of its data is compared, recorded and used as it is."""

import json
import os
import random as chance
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

import dbrdist
from dbrdist.cli.builders import build, weights
from dbrdist.cli.configuration import document, load
from dbrdist.core.files import safetensors, serializer
from dbrdist.models import ResNet50
from dbrdist.training import runs
from tests.each import each

DIGITS = "model: {name: mlp, units: [6]}\ndata: digits\nbatch: 100\nepochs: 1\nout: result\n"


def strict(text):
    """JSON as everybody else reads it."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---- names of values and classes


def test_a_best_snapshot_starts_anew_with_another_key(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", "snapshot.best=validation/main/loss")[0] == 0
    words = ["epochs=4", "snapshot.best=validation/main/accuracy", "optimizer.lr=0.2"]
    assert run("run.yaml", "--resume", *words)[0] == 0
    log = [json.loads(line) for line in Path("result/log.jsonl").read_text().splitlines()]
    best = max(log[1:], key=lambda entry: entry["validation/main/accuracy"])  # since the key is another one
    assert int(np.load("result/snapshot_best")["updater/iteration"]) == best["iteration"]


@pytest.mark.parametrize(
    ("best", "change", "begins_anew"),
    [
        ("validation/main/loss", "loss.label_smoothing=0.4", True),
        ("validation/main/accuracy", "loss.label_smoothing=0.4", False),
        ("validation/main/loss", "evaluation.batch=50", False),
    ],
)
def test_the_best_value_starts_anew_where_it_is_measured_otherwise(run, folder, best, change, begins_anew):
    (folder / "run.yaml").write_text(DIGITS)
    goal = f"stop={{metric: {best}, patience: 50}}"
    assert run("run.yaml", f"snapshot.best={best}", goal)[0] == 0
    code, out, _ = run("run.yaml", "--resume", f"snapshot.best={best}", goal, change, "epochs=2", "optimizer.lr=1e-9")
    words = f"the best {best} so far was measured with another {change.partition('=')[0]}"
    assert code == 0 and out.count(words) == 2 * begins_anew
    if begins_anew:  # the loss is higher with label smoothing, but the best of those
        assert int(np.load("result/snapshot_best")["updater/iteration"]) == 30


def images(root, classes, size=8):
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for k, name in enumerate(classes):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(3):
                pixels = np.full((size, size, 3), 40 + 60 * k, np.uint8) + rng.integers(0, 9, (size, size, 3), np.uint8)
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / name / f"{i}.png")


FOLDERS = """\
model: {name: mlp, units: [6]}
data: {name: image_folder, root: images}
transforms: {train: [{name: normalize, mean: [0.5], std: [0.25]}], test: [{name: normalize, mean: [0.5], std: [0.25]}]}
batch: 9
epochs: 2
optimizer: {lr: 0.05}
out: result
"""


@pytest.fixture
def trained(run, folder):
    """A run on images of three classes, whose second has got a name of the end of the alphabet since."""
    images(folder / "images", ["ash", "blood", "clay"])
    (folder / "run.yaml").write_text(FOLDERS)
    assert run("run.yaml")[0] == 0
    for part in ("train", "test"):
        os.rename(folder / "images" / part / "blood", folder / "images" / part / "zinc")
    return folder


@each(words=[["--resume", "epochs=3"], ["--evaluate", "result"]])
def test_data_with_other_classes_than_the_network_has_learned_is_refused(trained, run, words):
    before = Path("result/model.json").read_text()
    code, out, err = run("run.yaml", *words)
    assert code == 2 and "validation" not in out
    assert "class 1 was 'blood', now 'clay'; class 2 was 'clay', now 'zinc'" in err
    assert Path("result/model.json").read_text() == before


def test_a_library_that_loads_a_run_can_compare_classes(trained):
    dbrdist.load("result", classes=["ash", "blood", "clay"])
    with pytest.raises(dbrdist.errors.CheckpointError, match="class 1 was 'blood', now 'clay'"):
        dbrdist.load("result", classes=["ash", "clay", "blood"])


# ---- preprocessing and constants


def test_a_prediction_without_test_data_is_preprocessed_as_the_training_was(run, folder):
    """The reference is the network that the library loads, on pixels that NumPy normalises."""
    images(folder / "images", ["ash", "blood", "clay"])
    text = FOLDERS.replace("root: images", "root: images, test: null").replace("epochs: 2", "epochs: 5")
    text = text.replace(", test: [{name: normalize, mean: [0.5], std: [0.25]}]", "")
    (folder / "run.yaml").write_text(text.replace("train: [", "train: [random_flip, {name: mixup, p: 0.1}, "))
    assert run("run.yaml")[0] == 0
    paths = sorted(str(p) for p in (folder / "images/train").rglob("*.png"))
    code, out, err = run("--predict", "result", *paths)
    assert code == 0, err
    network = dbrdist.load("result")
    for path, line in zip(paths, out.splitlines()):
        pixels = np.asarray(Image.open(path), np.float64).transpose(2, 0, 1)[None] / 255
        with dbrdist.using_config("train", False):
            scores = network(((pixels - 0.5) / 0.25).astype(np.float32)).array[0].astype(np.float64)
        shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        k = int(shares.argmax())
        assert line.startswith(f"{path}: {['ash', 'blood', 'clay'][k]} {100 * shares[k]:.1f} %")


def test_a_prediction_of_unknown_chance_is_refused(run, folder):
    images(folder / "images", ["ash", "blood"])
    text = FOLDERS.replace("root: images", "root: images, test: null")
    text = text.replace(", test: [{name: normalize, mean: [0.5], std: [0.25]}]", "")
    (folder / "run.yaml").write_text(text.replace("train: [", "train: [{name: 'usernet:noise', args: {scale: 0.1}}, "))
    assert run("run.yaml")[0] == 0
    code, _, err = run("--predict", "result", "run.yaml", "images/train/ash/0.png")
    assert code == 2 and "transforms.train.0: this run has no test transforms, and usernet:noise may be random" in err


BATCH_NORMALIZED = """\
import numpy as np
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


def test_the_constants_of_weights_travel_with_them(run, folder):
    (folder / "ownnet.py").write_text(BATCH_NORMALIZED)
    (folder / "run.yaml").write_text(
        DIGITS.replace("{name: mlp, units: [6]}", "{name: 'ownnet:Net', args: {eps: 0.3}}")
    )
    assert run("run.yaml")[0] == 0
    import ownnet

    plain = ownnet.Net()  # with an eps of its own
    assert dbrdist.load("result", model=plain).bn.eps == 0.3
    code, out, _ = run("--export", "result", "w.safetensors")
    assert code == 0 and "eps 0.3" in out
    assert json.loads(safetensors.facts("w.safetensors")["constants"]) == {"bn.eps": 0.3}
    for source in ("w.safetensors", "result"):
        words = [f"out=from-{source}", f"init_from={source}", "model.args.eps=1e-3"]
        assert run("run.yaml", *words)[0] == 0
        assert dbrdist.load(f"from-{source}", model=ownnet.Net()).bn.eps == 0.3


@pytest.mark.slow
def test_weights_in_the_names_of_torchvision_have_the_eps_of_pytorch(tmp_path):
    """A file that only has the shapes of ResNet-50: what counts is which eps the network ends with."""
    net = ResNet50(num_classes=3)
    names = {}
    for path, link in net.namedlinks():
        prefix = path.strip("/").replace("/", ".")
        for name in (*link._params, *link._persistent):
            array = getattr(getattr(link, name), "array", getattr(link, name))
            if getattr(array, "ndim", 0):
                names[f"{prefix}.{name}"] = np.array(array)
    theirs = list(_torch_names())
    reverse = dict(zip(weights.from_torchvision(dict.fromkeys(theirs)), theirs))
    safetensors.save(str(tmp_path / "tv.safetensors"), {reverse[name]: value for name, value in names.items()})
    settings = SimpleNamespace(path=str(tmp_path / "tv.safetensors"), skip=("bn",))
    weights.begin_with(settings, net, SimpleNamespace(where=lambda path: "run.yaml"))
    assert net.blocks[0].bn1.eps == net.blocks[3].shortcut.bn.eps == 1e-5
    assert net.bn.eps == 2e-5  # was skipped


def _torch_names():
    normalization = ("weight", "bias", "running_mean", "running_var")
    yield from ("conv1.weight", *(f"bn1.{name}" for name in normalization), "fc.weight", "fc.bias")
    for layer, count in enumerate((3, 4, 6, 3), 1):
        for k in range(count):
            place = f"layer{layer}.{k}"
            for n in (1, 2, 3):
                yield from (f"{place}.conv{n}.weight", *(f"{place}.bn{n}.{name}" for name in normalization))
            if k == 0:
                yield f"{place}.downsample.0.weight"
                yield from (f"{place}.downsample.1.{name}" for name in normalization)


def test_a_resumed_run_needs_the_file_of_its_first_weights_no_more(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", "out=first")[0] == 0
    assert run("run.yaml", "init_from=first")[0] == 0
    shutil.rmtree("first")
    code, out, err = run("run.yaml", "init_from=first", "--resume", "epochs=2")
    assert code == 0 and "2 epochs" in out, err


def test_a_number_whose_schedule_has_gone_is_the_one_that_is_recorded(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    scheduled = "schedules=[{of: optimizer.momentum, schedule: {name: polynomial, end: 0.1}}]"
    assert run("run.yaml", scheduled)[0] == 0
    assert np.load("result/snapshot_iter_15")["updater/optimizer:main/hyperparam/momentum"] < 0.2
    assert run("run.yaml", "epochs=2", "--resume")[0] == 0
    assert np.load("result/snapshot_iter_30")["updater/optimizer:main/hyperparam/momentum"] == 0.9
    assert yaml.safe_load(Path("result/config.yaml").read_text())["optimizer"]["momentum"] == 0.9


# ---- texts


PARTS = [
    *(chr(c) for c in range(32, 127)),
    *("\n", "\t", "\r", "\0", "\x07", "\x7f", "\x85", "\xa0", "\u2028", "\u2029", "\ufeff", "\udce9", "é", "漢", "😀"),
    *("<<", "~", "null", "1e3", "1_0", "0x1", "0o7", ".inf", ".nan", "true", "no", "---", "...", "- ", ": ", " #"),
    *("%YAML", "&a", "*a", "!!str", "=", "2020-01-01", "12:30", "\n\n", "\n "),
]


def text_of(rng):
    return "".join(rng.choice(PARTS) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 20, 200])))


@pytest.mark.slow
def test_every_text_is_read_as_it_was_written():
    rng = chance.Random(5)
    for _ in range(600):
        data = {
            "a": [text_of(rng), {text_of(rng): text_of(rng)}],
            text_of(rng): rng.choice([1e-5, 1e22, 3, None, True]),
        }
        found = document.read(document.write(data).encode().decode(), "f")
        assert found.data == data and not found.problems


@pytest.mark.slow
@each(
    text=[
        "1e-3",
        "1e3",
        "0o7",
        "1_0",
        "yes",
        "null",
        "~",
        "2020-01-01",
        "<<",
        "12:30",
        ".inf",
        "\n",
        "a\x85b",
        "=",
        "0x1",
    ]
)
def test_a_configuration_keeps_its_texts(text):
    data = {"model": {"name": "a.b:c", "args": {"tag": text, text: [text]}}, "data": "digits", "batch": 1, "epochs": 1}
    config, _ = load.check(document.write(data).encode(), "f")
    again, _ = load.check(load.dump(config).encode(), "f")
    assert again == config and again.model.args == {"tag": text, text: [text]}


def test_a_folder_named_like_a_number_is_evaluated(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", "out=1e-3")[0] == 0
    assert run("--evaluate", "./1e-3")[0] == 0
    code, out, _ = run("run.yaml", "out=1e-3", "--resume", "epochs=2")
    assert code == 0 and out.count(" is now ") == 1  # the epochs


METRIC = (
    "def endless(outputs, labels):\n    return float('inf')\n\n\ndef none(outputs, labels):\n    return float('nan')\n"
)


def test_all_json_of_a_run_is_json(run, folder):
    (folder / "odd.py").write_text(METRIC)
    (folder / "run.yaml").write_text(DIGITS + "metrics: ['odd:endless', 'odd:none']\n")
    assert run("run.yaml")[0] == 0
    summary = strict(Path("result/summary.json").read_text())
    assert summary["metrics"]["main/none"] is None and summary["metrics"]["main/endless"] is None
    entries = [strict(line) for line in Path("result/log.jsonl").read_text().splitlines()]
    assert entries[-1]["validation/main/none"] is None
    code, out, _ = run("run.yaml", "--evaluate", "result")
    assert code == 0 and strict(out)["validation/main/endless"] is None
    strict(Path("result/model.json").read_text())


# ---- data


def test_an_empty_test_set_is_said_in_a_sentence(run, folder):
    (folder / "run.yaml").write_text(
        "model: {name: 'usernet:Net'}\ndata: {name: 'usernet:few', args: {n: 20}}\nbatch: 10\nepochs: 1\n"
    )
    (folder / "usernet.py").write_text((folder / "usernet.py").read_text().replace("or None", ""))
    code, _, err = run("run.yaml")
    assert code == 2 and "data: the test set is empty" in err


def test_labels_beyond_the_network_end_an_evaluation_in_a_sentence(run, folder):
    for path, num_classes in (("a.npz", 3), ("b.npz", 5)):
        np.savez(path, x=np.zeros((20, 4), np.float32), y=np.arange(20) % num_classes)
    text = DIGITS.replace("digits", "{name: npz, train: a.npz, test: a.npz}").replace("100", "10")
    (folder / "run.yaml").write_text(text)
    assert run("run.yaml")[0] == 0
    code, _, err = run("--evaluate", "result", "data.test=b.npz")
    assert code == 2 and "the network has 3 outputs, but a test label is 4" in err and "Traceback" not in err


@each(dtype=["uint8", "int64", "bool"])
def test_images_of_integers_need_no_transform(run, folder, dtype):
    rng = np.random.default_rng(0)
    np.savez("a.npz", x=rng.integers(0, 2, (20, 3, 4, 4)).astype(dtype), y=rng.integers(0, 3, 20))
    (folder / "run.yaml").write_text(DIGITS.replace("digits", "{name: npz, train: a.npz}").replace("100", "10"))
    code, _, err = run("run.yaml", "--overwrite")
    assert code == 0, err


OWN_DATA = """
import numpy as np

def pixels(dtype="uint8", three=True):
    examples = [(np.full((3, 4, 4) if three else 48, k % 3 * 80, dtype), np.int32(k % 3)) for k in range(18)]
    return examples, examples[:6]

def iterated():
    examples, _ = pixels()
    return examples, iter(examples)

class Counted:
    # Its examples depend on how many were read before, as those that draw from numpy.random do.
    def __init__(self, size):
        self.size, self.reads = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError(i)
        self.reads += 1
        return np.full((3, 4, 4), self.reads % 7, "f"), np.int32(i % 3)

made = []

def counted():
    made[:] = Counted(18), None
    return tuple(made)
"""


@each(dtype=["uint8", "int32", "bool"])
def test_images_of_integers_of_an_own_dataset_need_no_transform(run, folder, dtype):
    (folder / "own_pixels.py").write_text(OWN_DATA)
    text = DIGITS.replace("digits", f"{{name: 'own_pixels:pixels', args: {{dtype: {dtype}}}}}").replace(
        "batch: 100", "batch: 6"
    )
    (folder / "run.yaml").write_text(text)
    code, _, err = run("run.yaml", "model={name: mlp, units: [4], num_classes: 3}", "--overwrite")
    assert code == 0, err


def test_examples_of_an_own_dataset_are_not_read_before_their_turn(run, folder, monkeypatch):
    """One that draws as it is read, or counts, would give others."""
    (folder / "own_counted.py").write_text(OWN_DATA)
    monkeypatch.syspath_prepend(folder)
    import own_counted

    (folder / "run.yaml").write_text(DIGITS.replace("digits", "own_counted:counted"))
    build.data(*load.load("run.yaml", ["model={name: mlp, units: [4], num_classes: 3}"]))
    assert own_counted.made[0].reads == 0


def test_test_data_without_a_length_are_refused_in_one_line(run, folder):
    (folder / "own_pixels.py").write_text(OWN_DATA)
    (folder / "run.yaml").write_text(DIGITS.replace("digits", "own_pixels:iterated"))
    code, _, err = run("run.yaml", "model={name: mlp, units: [4], num_classes: 3}", "--overwrite")
    assert code == 2 and "got list_iterator; list(...) makes one of an iterator" in err and "Traceback" not in err


def test_a_header_that_claims_more_than_there_is_costs_no_memory(run, folder):
    np.savez("a.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int32))
    with zipfile.ZipFile("a.npz") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["x.npy"] = entries["x.npy"].replace(b"(4, 2), }            ", b"(9000000000000, 2), }")
    with zipfile.ZipFile("a.npz", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    (folder / "run.yaml").write_text(DIGITS.replace("digits", "{name: npz, train: a.npz}"))
    code, _, err = run("run.yaml", "--dry-run")
    assert code == 2 and "its header claims (9000000000000, 2)" in err


@each(corrupt=["fail", "skip"])
def test_an_image_that_a_transform_would_make_too_large_is_corrupt(run, folder, corrupt):
    images(folder / "images", ["ash", "blood"])
    Image.new("RGB", (60_000, 1)).save(folder / "images/train/ash/thin.png")
    text = FOLDERS.replace("train: [", "train: [{name: resize, size: 256}, {name: center_crop, size: 8}, ")
    (folder / "run.yaml").write_text(text.replace("root: images", f"root: images, corrupt: {corrupt}"))
    code, out, err = run("run.yaml", "--overwrite")
    words = "becomes one of 256x15360000, more than the limit of 100,000,000 pixels"
    if corrupt == "fail":
        assert code == 2 and words in err and "thin.png" in err
    else:
        assert code == 0 and "1 corrupt training example left out" in out
        assert words in strict(Path("result/summary.json").read_text())["skipped_examples"][0]


@each(crop=["center_crop", "random_crop"], corrupt=["fail", "skip"])
def test_an_image_that_is_smaller_than_a_crop_is_named_or_left_out(run, folder, crop, corrupt):
    images(folder / "images", ["ash", "blood"])
    Image.new("RGB", (5, 20)).save(folder / "images/train/ash/small.png")
    text = FOLDERS.replace("train: [", f"train: [{{name: {crop}, size: 8}}, ")
    (folder / "run.yaml").write_text(text.replace("root: images", f"root: images, corrupt: {corrupt}"))
    code, out, err = run("run.yaml", "--overwrite")
    words = "small.png: expected an image of at least 8x8"
    if corrupt == "fail":
        assert code == 2 and words in err and "Traceback" not in err
    else:
        assert code == 0 and "1 corrupt training example left out" in out
        assert words in strict(Path("result/summary.json").read_text())["skipped_examples"][0]


# ---- live runs, background, left-overs


def test_a_snapshot_that_goes_while_it_is_read_is_looked_for_again(run, folder, monkeypatch):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", "snapshot.keep=5", "epochs=4")[0] == 0
    real, gone = serializer.read_npz, []

    def read(path):
        if len(gone) < 1 and str(path).endswith("60"):  # the run has saved the next one and removed this
            os.rename(path, path.replace("60", "75"))
            gone.append(path)
        return real(path)

    monkeypatch.setattr(runs, "read_npz", read)
    assert dbrdist.load("result") is not None and gone
    os.rename("result/snapshot_iter_75", "result/snapshot_iter_60")
    gone.clear()
    assert run("--evaluate", "result")[0] == 0 and gone


def test_snapshots_in_the_background_are_those_of_the_foreground(run, folder):
    (folder / "run.yaml").write_text(DIGITS + "snapshot: {every: 3 iterations, best: validation/main/loss}\n")
    assert run("run.yaml", "out=a")[0] == 0
    assert run("run.yaml", "out=b", "snapshot.background=true")[0] == 0
    names = sorted(name for name in os.listdir("a") if name.startswith("snapshot"))
    assert names == sorted(name for name in os.listdir("b") if name.startswith("snapshot")) and len(names) == 3
    for name in names:
        first, second = np.load(f"a/{name}"), np.load(f"b/{name}")
        assert set(first) == set(second)
        for key in first:
            if not key.endswith("elapsed_time"):
                assert np.array_equal(first[key], second[key]), key


def test_batches_that_are_too_few_for_an_update_are_said(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    code, out, _ = run("run.yaml", "accumulate=4")
    assert code == 0 and out.count("accumulate: 3 batches left over at step 15") == 2
    _, out, _ = run("run.yaml", "accumulate=5", "--overwrite")
    assert "left over" not in out


# ---- words


def test_lines_break_on_terminals_only_and_figures_are_aligned(run, folder):
    (folder / "run.yaml").write_text(DIGITS)
    code, out, err = run("run.yaml", "epochs=3")
    assert code == 0 and "communicator" not in err and "ranks:" not in out and "allreduce" not in out
    (memory,) = (line for line in out.splitlines() if line.startswith("memory:"))
    assert "free here" in memory
    heading, *rows = _table(out)
    ends = [heading.index(word) + len(word) for word in ("epoch", "step", "accuracy", "test loss", "test acc")]
    for row in rows:
        assert all(row[end - 1 : end] not in ("", " ") and row[end : end + 1] in ("", " ") for end in ends)
        assert row.count(" %") == 2


def _table(out):
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["epoch", "step"])
    return lines[first : first + 4]
