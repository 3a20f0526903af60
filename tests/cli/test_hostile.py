"""Input that is wrong, absurd or hostile ends with sentences, before anything is lost."""

import json
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dbrdist.cli.builders import preflight
from dbrdist.cli.configuration.load import load
from dbrdist.datasets.image import images
from dbrdist.errors import ConfigError
from tests.cli.cli_helpers import lines, same_runs

OWN = """
import numpy as np
import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.core.model.reporter import report
from dbrdist.datasets import DictDataset, TupleDataset

def numbers(n, labels=3, test_width=4, last=0):
    x = np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)
    t = np.arange(n, dtype=np.int32) % labels
    t[-1:] = last
    made = TupleDataset(x, t), TupleDataset(x[:6, :test_width], t[:6])
    return made

def closure(n):
    train, test = numbers(n)
    train.hidden = lambda: 0
    return train, test

def named(n):
    x = np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)
    return DictDataset(x=x, t=np.arange(n, dtype=np.int32) % 3), DictDataset(x=x[:6], t=np.zeros(6, np.int32))

class Small(dbrdist.Chain):
    def __init__(self, outputs=3):
        super().__init__()
        with self.init_scope():
            self.l = L.Linear(None, outputs)

    def forward(self, x):
        return self.l(x)

class Whole(Small):
    def forward(self, x, t):
        loss = F.softmax_cross_entropy(self.l(x), t)
        return loss

def wrong(example, rng):
    raise KeyError("not there")

def make_wrong():
    return wrong

def odd_metric(outputs, labels, kind):
    return {"text": "high", "nothing": None, "complex": 1j, "endless": 10**400, "list": [1]}[kind]
"""
CONFIG = """\
model: {name: 'hostile:Small'}
data: {name: 'hostile:numbers', args: {n: 40}}
batch: 8
epochs: 2
"""


@pytest.fixture(autouse=True)
def own(folder):
    (folder / "hostile.py").write_text(OWN)
    (folder / "h.yaml").write_text(CONFIG)
    yield
    sys.modules.pop("hostile", None)


def refused(run, *words):
    got, _, err = run(*words)
    assert got == 2, err
    assert "Traceback" not in err
    assert not Path("result").exists()
    return err


# ---- configurations ----


@pytest.mark.slow
def test_a_bomb_of_aliases(tmp_path):
    text = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for before, name in zip("abcdefgh", "bcdefghi"):
        text += f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    Path("bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match="expected at most 100,000 entries, with aliases"):
        load("bomb.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.hooks=[weight_decay]", "optimizer.hooks.².rate=1"], "hooks is a list of 1; number its items"),
        (["epochs=1e308"], "epochs: must be at most 1e+09"),
        (["epochs=1e-300"], "epochs: 1e-300 epochs are less than one step"),
        ([f"batch={'9' * 4000}"], "batch: must be at most 2.14748e+09"),
        ([f"batch={'9' * 5000}"], "is not a number"),
        (['out="a\\0b"'], "out: expected text without the character NUL"),
        (['data={name: npz, train: "a\\0b"}'], "data.train: expected text without the character NUL"),
        ([f"model={'[' * 3000}"], "nested too deeply"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_absurd_settings(run, words, message, option):
    assert message in refused(run, "h.yaml", *words, *option)


def test_a_huge_file_is_not_read(run):
    with open("huge.yaml", "wb") as file:
        file.truncate(1 << 33)
    assert "expected a configuration of at most 10,000,000 bytes" in refused(run, "huge.yaml")


# ---- a look before the first step ----


@pytest.mark.parametrize("kind", ["text", "nothing", "complex", "endless", "list"])
def test_a_metric_that_is_no_number_is_said_before_the_first_step(run, kind):
    err = refused(run, "h.yaml", f"metrics=[{{name: 'hostile:odd_metric', args: {{kind: {kind}}}}}]")
    assert "metric odd_metric: expected a number, got " in err


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.args.last=-3"], "data: a training label is -3; classes are counted from 0, and -1 is"),
        (["data.args.labels=5"], "the network has 3 outputs, but a training label is 4; labels are counted from 0"),
        (["data.args.test_width=3"], "computing a test batch of float32 (4, 3) failed: "),
        (["transforms.train=['hostile:make_wrong']"], "transforms.train: reading a training example failed: KeyError"),
        (["transforms.test=['hostile:make_wrong']"], "transforms.test: reading a test example failed: KeyError"),
        (["data.args.n=0"], "data: the training set is empty"),
        (["data=hostile:closure", "data.args.n=9", "workers=1"], "the training data cannot be sent to loader process"),
        (["data=hostile:named", "data.args.n=9"], "expected examples of (input, label), got dictionaries of x, t"),
        (["model=resnet20", "model.num_classes=3"], "model: "),
    ],
)
def test_mistakes_are_found_before_the_first_step(run, words, message, option):
    assert message in refused(run, "h.yaml", *words, *option)


def test_all_mistakes_at_once(run, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    err = refused(run, "h.yaml", "data.args.labels=5", "transforms.test=['hostile:make_wrong']")
    assert "outputs" in err and "transforms.test" in err and "10 bytes are free" in err


def test_the_look_changes_no_number(run, monkeypatch):
    assert run("run.yaml", "out=with")[0] == 0
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    assert run("run.yaml", "out=without")[0] == 0
    same_runs("with", "without")


def test_datasets_of_dictionaries(run):
    words = ("data=hostile:named", "data.args.n=40", "loss=model", "model=hostile:Whole")
    code, _, err = run("h.yaml", *words)
    assert code == 0, err
    losses = [entry["main/loss"] for entry in lines("result/log.jsonl")]
    assert losses[-1] < losses[0]


def test_labels_that_stand_for_none(run):
    np.savez("empty.npz", x=np.zeros((0, 4), np.float32), y=np.zeros(0, np.int32))
    assert "data: the training set is empty" in refused(
        run, "h.yaml", "model=mlp", "data={name: npz, train: empty.npz}"
    )
    np.savez("none.npz", x=np.zeros((20, 4), np.float32), y=-np.ones(20, np.int32))
    err = refused(run, "h.yaml", "model=mlp", "data={name: npz, train: none.npz}")
    assert "expected labels from 0, but all of them are -1 or less" in err


# ---- images ----


def jpeg(height, width, claim=None):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    if claim:
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", *claim)
    return bytes(data)


def png(height, width):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (jpeg(8, 8, (20_000, 20_000)), "20000x20000"),
        (jpeg(8, 8, (65_500, 65_500)), "65500x65500"),
        (png(2**31 - 1, 2**31 - 1), "2147483647x2147483647"),
    ],
)
def test_an_image_that_claims_an_absurd_size(data, claim):
    assert len(data) < 1000
    with pytest.raises(images.ImageDecodeError, match=f"it claims {claim} pixels, more than the limit of 100,000,000"):
        images.decode(data)


def photos(root, part, num, bad=(), size=8):
    for label, name in enumerate(["cat", "dog"]):
        folder = Path(root, part, name)
        folder.mkdir(parents=True)
        for i in range(num):
            data = jpeg(size, size + (i if size < 0 else 0))
            (folder / f"{i}.jpg").write_bytes(data[:40] if (label, i) in bad else data)


PHOTOS = ["data={name: image_folder, root: photos, corrupt: skip}", "model=mlp", "transforms.train=[]", "batch=4"]


@pytest.mark.filterwarnings("ignore:.*gets pixels")  # as they are
def test_each_example_that_is_left_out_is_named_once_for_both_parts(run):
    photos("photos", "train", 6, bad={(0, 2)})
    photos("photos", "test", 6, bad={(0, 1), (1, 5)})
    code, out, _ = run("h.yaml", *PHOTOS, "epochs=10")
    assert code == 0
    told = json.loads(Path("result/summary.json").read_text())
    assert (told["num_skipped_examples"], told["num_skipped_test_examples"]) == (1, 2)
    assert "photos/train/cat/2.jpg" in told["skipped_examples"][0]
    assert [text.split(":")[0][-9:] for text in told["skipped_test_examples"]] == ["cat/1.jpg", "dog/5.jpg"]
    assert "1 corrupt training example left out" in out and "2 corrupt test examples left out" in out
    code, out, _ = run("h.yaml", *PHOTOS, "epochs=12", "--resume")
    assert json.loads(Path("result/summary.json").read_text())["num_skipped_examples"] == 1


@pytest.mark.filterwarnings("ignore:.*gets pixels")  # as they are
def test_a_batch_without_a_good_image_does_not_end_the_run(run):
    photos("photos", "train", 4, bad={(0, i) for i in range(4)} | {(1, 0)})
    photos("photos", "test", 2)
    code, _, err = run("h.yaml", *PHOTOS, "batch=1", "epochs=2", "log.every=1 iteration")
    assert code == 0, err
    log = lines("result/log.jsonl")
    assert len(log) == 16
    assert sum("main/loss" in entry for entry in log) == 6
    assert json.loads(Path("result/summary.json").read_text())["num_skipped_examples"] == 5


@pytest.mark.slow
def test_means_weigh_what_was_read(ranks):
    """Two ranks; one reads one image of two, so its loss counts half."""
    photos("photos", "train", 2, bad={(0, 1)})
    words = ["h.yaml", *PHOTOS, "data.test=null", "epochs=1", "optimizer={name: sgd, lr: 1e-9}", "dtype=float64"]
    losses = []
    for n in (1, 2):
        process = ranks(n, *words, f"out=r{n}")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        losses.append(lines(f"r{n}/log.jsonl")[0]["main/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_images_of_several_sizes_in_a_cache(run):
    photos("photos", "train", 2)
    (Path("photos/train/dog/9.jpg")).write_bytes(jpeg(9, 9))
    words = ["data={name: image_folder, root: photos, cache: true, test: null}", "model=mlp", "batch=1"]
    code, _, err = run("h.yaml", *words)
    assert code == 2
    assert re.search(r"expected images of one size for cache=True: .*jpg has .*; resize them", err)
