"""The least and the greatest value that each setting takes, and how much of everything is kept."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
from test_config import GOOD, config

from dbrdist.cli import data, folder
from dbrdist.cli.console import Console
from dbrdist.cli.document import read
from dbrdist.cli.folder import SUMMARY, RunFolder
from dbrdist.cli.load import load
from dbrdist.cli.warned import Warned
from dbrdist.errors import ConfigError

LARGEST = 2**31 - 1
TRAIN = "transforms.train=[{name: %s}]"


@pytest.mark.parametrize(
    ("setting", "taken", "refused"),
    [
        ("snapshot.keep=%s", [1, LARGEST], [0, LARGEST + 1, 1.5, "true"]),
        ("epochs=%s", [1e9, 0.5], [0, 1.1e9, ".inf"]),
        ("seed=%s", [0, 2**63 - 1], [-1, 2**63]), ("zero=%s", [0, 1, 2], [-1, 3]), ("out=%s", ["a"], ['""']),
        ("workers=%s", [0, 256], [-1, 257]), ("threads=%s", [0, 256], [-1, 257]),
        ("optimizer.lr=%s", [1e-300, 5.0], [0, -1.0, ".nan"]),
        ("optimizer={name: msvag, beta: %s}", [0, 0.999], [-0.001, 1]),
        ("optimizer={name: lars, weight_decay: %s}", [0, 3.0], [-1e-9]),
        ("optimizer.schedule={name: step, milestones: %s}", ["[1]", "[1, 2.5]"], ["[]", "[0]", "[2, 1]", "[1, 1]"]),
        ("compression={name: top_k, fraction: %s}", [1, 1e-9], [0, 1.01]),
        ("loss.label_smoothing=%s", [0, 0.99], [1, -0.1]),
        (TRAIN % "mixup, p: %s", [0, 1], [-0.1, 1.1]), (TRAIN % "mixup, alpha: %s", [1e-9], [0]),
        (TRAIN % "random_crop, size: 8, padding: %s", [0, 9], [-1]),
        (TRAIN % "random_crop, size: %s", [1, 65535, "[[0, 1]]", "[[0, 65535], [3, 8]]"],
         [0, 65536, "true", "[]", "[[1, 8]]", "[[0, 8], [0, 9]]", "[[0, 8], [3, 0]]", "[[0, 65536]]", "[[0, 8, 9]]"]),
        (TRAIN % "random_resized_crop, size: 8, smallest: %s", [1, 1e-9], [0, 1.01]),
        (TRAIN % "random_resized_crop, size: 8, largest: %s", [1, 0.5], [0, 1.01]),
        (TRAIN % "center_resized_crop, size: 8, ratio: %s", [1, 1e-9], [0, 1.01]),
        (TRAIN % "color_jitter, hue: %s", [0, 0.5], [-0.01, 0.51]),
        (TRAIN % "color_jitter, contrast: %s", [0, 9], [-0.1]),
        (TRAIN % "random_erasing, value: %s", [0, 255, "noise"], [-1, 256, "black"]),
        (TRAIN % "random_erasing, smallest: %s", [0.3, 1e-9], [0, 1.01]),
        (TRAIN % "random_erasing, largest: %s", [0.5, 1], [0, 1.01]),
        (TRAIN % "rand_augment, magnitude: %s", [0, 30], [-0.1, 30.1]), (TRAIN % "rand_augment, num_ops: %s", [1], [0]),
        (TRAIN % "normalize, std: [1.0], mean: %s", ["[0.5]"], ["[]"]),
        (TRAIN % "normalize, mean: [0.5], std: %s", ["[0.5]"], ["[]", "[0.0]"]),
    ],
)  # fmt: skip
def test_bounds_of_settings(setting, taken, refused):
    key = setting.partition("=")[0].split(".")[0]
    base = "".join(f"{line}\n" for line in GOOD.splitlines() if not line.startswith(f"{key}:"))
    for value in taken:
        config(base, setting % value)
    for value in refused:
        with pytest.raises(ConfigError, match=rf"(?s)command line .*{key}"):
            config(base, setting % value)


# ---- how much is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "is_taken"), [(0, True), (1, False)])
def test_a_hundred_thousand_entries_are_enough(more, is_taken):
    """The whole is one, and so is each list; 998 times a hundred, by an alias, 100 where it stands, and the rest."""
    text = f"a: &x [{', '.join('0' * 99)}]\nb: [{', '.join(['*x'] * 998)}]\nc: [{', '.join('0' * (97 + more))}]\n"
    found = read(text, "f")
    assert found.problems == ([] if is_taken else ["f: expected at most 100,000 entries, with aliases (*) expanded"])


@pytest.mark.parametrize(("number", "is_taken"), [(10, True), (11, False)])
def test_ten_files_may_extend_one_another(tmp_path, number, is_taken):
    for k in range(number):
        text = f"extends: {k + 1}.yaml\n" if k < number - 1 else GOOD
        (tmp_path / f"{k}.yaml").write_text(text)
    if is_taken:
        assert len(load(tmp_path / "0.yaml")[1].files) == 10
    else:
        with pytest.raises(ConfigError, match="expected at most 10 files that extend one another"):
            load(tmp_path / "0.yaml")


def test_a_thousand_lines_wait_for_the_log(tmp_path):
    console = Console()
    for number in range(1001):
        console.log(f"line {number}")
    console.open(str(tmp_path / "log.txt"), "heading")
    console.close()
    found = (tmp_path / "log.txt").read_text().splitlines()
    assert len(found) == 1001 and found[0].endswith("  heading") and found[-1].endswith("  line 999")


def test_a_thousand_warnings_are_told_apart():
    said = []
    warned = Warned(0, SimpleNamespace(warn=said.append))
    with warned.listening(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned._take
        for number in [*range(1001), 0]:
            warnings.warn(f"odd {number}", stacklevel=1)
    assert len(said) == 1000 and said[-1].startswith("odd 999 (UserWarning at ")


def test_a_thousand_bad_images_are_named(capsys):
    for number in (1000, 1001):
        found = SimpleNamespace(bad=[f"image {k}" for k in range(number)], num_good=1)
        assert data._report(found, "good") == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2:] == ["image 999", f"1 image good, {number:,} bad"] and len(lines) == 1001
    assert data._report(SimpleNamespace(bad=[], num_good=2), "written to x") == 0
    assert capsys.readouterr().out == "2 images written to x, 0 bad\n"


def test_the_end_of_a_run_is_written_in_brief_where_the_disk_is_full(tmp_path, monkeypatch):
    one = RunFolder(str(tmp_path))
    one.write_status("running", began="now")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_json", full)
    one.write_status("running", began="later")  # without its blanks; what is there stays
    one.write_status("failed", "x" * 20000, epochs=3)
    size, found = (tmp_path / SUMMARY).stat().st_size, json.loads((tmp_path / SUMMARY).read_text())
    assert found == {"status": "failed", "reason": "x" * 2000, "began": "later"} and size < 1 << 15
    one.summary = {}
    one.write_status("failed", None, note="y" * 20000)
    assert json.loads((tmp_path / SUMMARY).read_text()) == {"status": "failed", "reason": None}
    one.summary = {"note": "y" * 20000}
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", None)
