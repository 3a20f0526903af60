"""`dbrdist-data`, and configurations that name what it made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli import data
from dbrdist.datasets import open_images
from dbrdist.datasets.image import images
from tests.datasets.image_files import class_folders, jpeg

pytest.importorskip("simplejpeg", reason="needs dbrdist[image]")


@pytest.fixture
def root(tmp_path):
    for part in ("train", "test"):
        class_folders(tmp_path / "in" / part, (("ant", 5), ("bee", 4)))
    return tmp_path / "in"


def test_build_check_prepare_info(root, tmp_path, capsys):
    assert data.run(["info", str(root / "train")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no index: every run scans it once"
    assert data.run(["build", str(root / "train")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{root}/train: 9 images in class folders"
    assert out[1] == "2 classes of 4 to 5 images: ant, bee"
    assert out[2].startswith(f"wrote {root}/train/dbrdist.index, ")
    assert data.run(["check", str(root / "train"), "--threads", "2"]) == 0
    assert capsys.readouterr().out == "9 images good, 0 bad\n"
    out = tmp_path / "out"
    assert data.run(["prepare", str(root / "train"), str(out), "--size", "12", "--threads", "1"]) == 0
    assert "9 images in 1 tar shard, " in capsys.readouterr().out
    assert {images.decode(open_images(out).read(i)).shape for i in range(9)} == {(12, 16, 3)}
    assert data.run(["info", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(": up to date")
    (root / "train" / "ant" / "more.jpg").write_bytes(jpeg(9)[:-20])
    assert data.run(["info", str(root / "train")]) == 0
    assert "files came or went in the class folder" in capsys.readouterr().out
    assert data.run(["check", str(root / "train")]) == 2
    assert "out of date" in capsys.readouterr().err
    assert data.run(["build", str(root / "train"), "--to", str(tmp_path / "far.index")]) == 0
    capsys.readouterr()
    assert data.run(["check", str(tmp_path / "far.index")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "9 images good, 1 bad"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["build", "nowhere"], "dbrdist-data: expected a folder with one folder of images per class, but nowhere is"),
        (["info", "x.index"], "got another file"),
        (["prepare", "in/train", "in/test"], "expected an empty folder for the shards, but in/test has files in it"),
        (["prepare", "in/train", "out", "--quality", "0"], "0 is not in the range 1<=x<=100"),
        (["build", "in/train", "--to", "no/such/folder/x"], "No such file or directory"),
        (["check", "in"], "expected images (.jpg, .jpeg, .png) in the class folder in/test, found none"),
        (["frob"], "No such command 'frob'"),
    ],
)
def test_mistakes_are_one_sentence(root, monkeypatch, capfd, words, expected):
    monkeypatch.chdir(root.parent)
    Path("x.index").write_text("hello")
    assert data.run(words) == 2
    err = capfd.readouterr().err
    assert expected in err and "Traceback" not in err


@pytest.mark.programs
def test_the_program_ends_with_the_code():
    command = [sys.executable, "-m", "dbrdist.cli.data", "info", "nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1


CONFIG = """
model: {name: lenet, channels: [2, 2], units: 4}
data: {name: image_folder, root: ROOT, train: TRAIN, test: TEST}
transforms: {train: [{name: center_crop, size: 16}], test: [{name: center_crop, size: 16}]}
optimizer: {name: sgd, lr: 0.1}
batch: 3
epochs: 1
"""


@pytest.mark.filterwarnings("ignore:.*gets pixels")  # as they are
@pytest.mark.parametrize("kind", ["index inside", "index elsewhere", "shards"])
def test_a_configuration_names_an_index_or_shards_like_a_folder(root, tmp_path, kind, run):
    """The losses are those of the class folders, bit for bit."""

    def losses(out, train_, test):
        text = CONFIG.replace("ROOT", str(root)).replace("TRAIN", str(train_)).replace("TEST", str(test))
        (tmp_path / "c.yaml").write_text(f"{text}out: {tmp_path / out}\n")
        assert run("c.yaml")[0] == 0
        lines = (tmp_path / out / "log.jsonl").read_text().splitlines()
        return [(line["main/loss"], line["validation/main/loss"]) for line in map(json.loads, lines)]

    expected = losses("before", "train", "test")
    names = {part: root / part for part in ("train", "test")}
    for part, place in names.items():
        if kind == "index inside":
            assert data.run(["build", str(place)]) == 0
        elif kind == "index elsewhere":
            names[part] = tmp_path / f"{part}.index"
            assert data.run(["build", str(place), "--to", str(names[part])]) == 0
        else:
            names[part] = tmp_path / f"{part}-shards"
            assert data.run(["prepare", str(place), str(names[part])]) == 0
    assert losses("after", names["train"], names["test"]) == expected


def test_an_index_out_of_date_ends_a_run_with_a_sentence(root, tmp_path, run):
    (tmp_path / "c.yaml").write_text(
        CONFIG.replace("ROOT", str(root)).replace("TRAIN", "train").replace("TEST", "null") + f"out: {tmp_path / 'o'}\n"
    )
    assert data.run(["build", str(root / "train")]) == 0
    (root / "train" / "ant" / "more.jpg").write_bytes(jpeg(9))
    code, _, err = run("c.yaml")
    assert code == 2
    assert "c.yaml:3:7: data: " in err and "the index is out of date: files came or went" in err


ALL = """
model: resnet20
data: {name: image_folder, root: ROOT, train: train, test: test}
transforms:
  train:
    - {name: random_resized_crop, size: [[0, 8], [1, 16]], smallest: 0.3, ratio: [0.5, 2.0], method: area}
    - random_flip
    - {name: color_jitter, hue: 0.1}
    - pca_lighting
    - {name: rand_augment, num_ops: 1}
    - {name: random_erasing, value: noise}
    - {name: normalize, mean: [0.5], std: [0.2]}
    - {name: mixup, p: 0.8}
    - CutMix
  test: [{name: center_resized_crop, size: 16}, {name: normalize, mean: [0.5], std: [0.2]}]
loss: {name: softmax_cross_entropy, label_smoothing: 0.1}
optimizer: {name: sgd, lr: 0.1}
batch: 4
epochs: 2
"""


@pytest.mark.programs
def test_a_run_with_every_transform_is_the_same_with_any_loader(root, tmp_path, run):
    (tmp_path / "c.yaml").write_text(ALL.replace("ROOT", str(root)))
    logs = []
    for words in (["threads=0"], ["threads=2"], ["workers=2"]):
        code, _, err = run("c.yaml", f"out={tmp_path / words[0]}", *words)
        assert code == 0, err
        lines = map(json.loads, (tmp_path / words[0] / "log.jsonl").read_text().splitlines())
        logs.append([[line[f"{part}main/{name}"] for part in ("", "validation/") for name in ("loss", "accuracy")]
                     for line in lines])  # fmt: skip
    assert logs[0] == logs[1] == logs[2]
    assert np.isfinite(logs[0]).all() and len(logs[0]) == 2


def test_a_thousand_bad_images_are_named(capsys):
    for number in (1000, 1001):
        found = SimpleNamespace(bad=[f"image {k}" for k in range(number)], num_good=1)
        assert data._report(found, "good") == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:] == ["image 999", f"1 image good, {number:,} bad"] and len(lines) == 1001
    assert data._report(SimpleNamespace(bad=[], num_good=2), "written to x") == 0
    assert capsys.readouterr().out == "2 images written to x, 0 bad\n"


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
    for now[0], done in ((9.5, 1), (10.0, 2000), (10.5, 2500), (19.5, 3000), (20.0, 4000)):
        progress(done, 8000)
    said = ["2,000 of 8,000 images, 30 s left", "4,000 of 8,000 images, 20 s left"]
    assert capsys.readouterr().err.splitlines() == said


def test_ignored_files_are_counted_by_ending_the_most_frequent_first(root, capsys):
    for number, ending in ((1, ".md"), (3, ".csv"), (2, ".TXT"), (1, "")):
        for k in range(number):
            (root / "train" / "ant" / f"{number}-{k}{ending}").write_text("no image")
    (root / "train" / "bee" / "below").mkdir()
    (root / "train" / "bee" / "below" / "a.jpg").write_bytes(jpeg(9))
    assert data.run(["info", str(root / "train")]) == 0
    words = "8 files ignored: 3 with .csv, 2 with .txt, 1 with "
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " ignored: " in line]
    assert line.startswith(words) and line.endswith(", 1 in folders below the class folders")
    assert "1 with .md" in line and "1 with no ending" in line


def test_how_options_are_passed_on(monkeypatch, capsys):
    """Each once as it is if not given, and once as given."""
    calls = []

    def note(*args, progress=None, **options):
        calls.append((*args, options))
        return SimpleNamespace(bad=[], num_good=0)

    monkeypatch.setattr(data.thread_pools, "num_cores", lambda: 7)
    monkeypatch.setattr(data, "open_images", lambda path: f"images of {path}")
    monkeypatch.setattr(data, "prepare_shards", note)
    monkeypatch.setattr(data, "check_images", lambda found, threads, progress: note(found, threads))
    own = ["--size", "32", "--quality", "80", "--shard-megabytes", "2", "--threads", "3"]
    for words in (["prepare", "a", "b"], ["prepare", "a", "b", *own], ["check", "a"], ["check", "a", "--threads", "2"]):
        assert data.run(words) == 0
    assert calls == [
        ("images of a", "b", {"size": 256, "quality": 90, "shard_bytes": 256_000_000, "num_threads": 7}),
        ("images of a", "b", {"size": 32, "quality": 80, "shard_bytes": 2_000_000, "num_threads": 3}),
        ("images of a", 7, {}),
        ("images of a", 2, {}),
    ]
    said = [
        "0 images written to b, 0 bad",
        "0 images written to b, 0 bad",
        "0 images good, 0 bad",
        "0 images good, 0 bad",
    ]
    assert capsys.readouterr().out.splitlines() == said
    for option, most in (("--size", 65536), ("--quality", 100), ("--threads", 1024)):
        assert data.run(["prepare", "a", "b", option, str(most)]) == 0
        for number in (0, most + 1):
            assert data.run(["prepare", "a", "b", option, str(number)]) == 2
            assert f"{number} is not in the range 1<=x<={most}" in capsys.readouterr().err
    assert data.run(["prepare", "a", "b", "--shard-megabytes", "0"]) == 2


def test_all_that_imagenet_says(monkeypatch, capsys):
    """What concerns one tar is said every ten seconds at most, anything else always."""
    calls, now = [], [0.0]
    skipped = [SimpleNamespace(tar="train.tar", name=f"a{k}.JPEG", reason="is a folder") for k in range(1001)]

    def extract(*args, say, **options):
        calls.append((args, options))
        for now[0], words in (
            (9.0, "train: 1"), (9.5, "checking"), (19.0, "val: 2"), (19.5, "train: 3"), (20.0, "val: 4"),
            (29.5, "val: 5"),
        ):  # fmt: skip
            say(words)
        odd = ["val/b.JPEG", "val/c.JPEG"] if len(calls) == 1 else []
        return SimpleNamespace(skipped=skipped[: 1001 if odd else 0], odd=odd, num_train=1200, num_val=1, num_classes=2)

    monkeypatch.setattr(data.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(data, "extract", extract)
    assert data.run(["imagenet", "t.tar", "v.tar", "root"]) == 0
    out, err = capsys.readouterr()
    now[0] = 0.0
    own = ["--labels", "kit", "--shards", "--any", "--no-checksums"]
    assert data.run(["imagenet", "t.tar", "v.tar", "root", *own]) == 0
    assert calls == [
        (("t.tar", "v.tar", "root", None), {"shards": False, "is_official": True, "checksums": True}),
        (("t.tar", "v.tar", "root", "kit"), {"shards": True, "is_official": False, "checksums": False}),
    ]
    assert err.splitlines() == ["checking", "train: 3", "val: 5"]
    lines = out.splitlines()
    assert lines[0] == "train.tar: a0.JPEG is a folder and was left out"
    assert lines[999:] == [
        "train.tar: a999.JPEG is a folder and was left out",
        "2 images beginning as neither JPEG nor PNG, val/b.JPEG for one: dbrdist-data check root/train and root/val "
        "name those that cannot be read",
        "root: 1,200 training images and 1 validation image of 2 classes, 1,001 entries left out",
    ]
    last = "root: 1,200 training images and 1 validation image of 2 classes, 0 entries left out\n"
    assert capsys.readouterr().out == last


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        (lambda: None, 0, ""), (lambda: 1, 1, ""), (lambda: "words", 0, ""),
        (KeyboardInterrupt(), 130, "dbrdist-data: interrupted\n"),
        (PermissionError(13, "Permission denied", "x.tar"), 2, "dbrdist-data: x.tar: Permission denied\n"),
        (ValueError("no images"), 2, "dbrdist-data: no images\n"),
        (EOFError("no end"), 2, "dbrdist-data: no end\n"),
    ],
)  # fmt: skip
def test_how_the_program_ends(monkeypatch, capsys, ends, code, words):
    def main(arguments, **options):
        assert options == {"prog_name": "dbrdist-data", "standalone_mode": False}
        if isinstance(ends, BaseException):
            raise ends
        return ends()

    protected = []
    monkeypatch.setattr(data.command, "main", main)
    monkeypatch.setattr(data.entry, "protect_streams", lambda: protected.append(1))
    with pytest.raises(SystemExit) as ended:
        data.main()
    assert (ended.value.code, capsys.readouterr().err, protected) == (code, words, [1])


@pytest.mark.parametrize(
    ("error", "words"),
    [(EOFError("no end-of-stream marker"), "no end-of-stream marker"), (BrokenPipeError(32, "gone"), "gone")],
)
def test_files_and_connections_that_end_early_are_said(monkeypatch, capsys, error, words):
    def fails(root):
        raise error

    monkeypatch.setattr(data, "open_images", fails)
    assert (data.run(["check", "root"]), capsys.readouterr().err) == (2, f"dbrdist-data: {words}\n")


def test_help_of_a_command_is_no_error(capsys):
    assert data.run(["check", "--help"]) == 0 and "Decode all images" in capsys.readouterr().out


def test_names_of_other_encodings_are_printed(capsys):
    data._print("caf\udce9.jpg")
    assert capsys.readouterr().out == "caf\\udce9.jpg\n"
