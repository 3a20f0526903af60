"""Snapshots of earlier versions, whose entries have other names: they load, or are refused in a sentence."""

import os
from pathlib import Path

import numpy as np
import pytest

from dbrdist.core.serializer import read_npz
from dbrdist.training.extensions import snapshots

EVERY = ["log.every=1 iteration", "snapshot.every=2 iterations", "snapshot.best=validation/main/loss"]


def renamed(path, change):
    """The snapshot with other names of entries; None leaves one out."""
    entries = {change(key): value for key, value in read_npz(path).items()}
    entries.pop(None, None)
    snapshots.write(path, entries)


@pytest.fixture
def cut(run):
    assert run("run.yaml", *EVERY, "iterations=2")[0] == 0
    return Path("result/snapshot_iter_2")


def test_triggers_without_their_numbers_are_refused_by_name(run, cut):
    """Triggers joined by `or` were single ones before, and had no number in their names."""
    renamed(str(cut), lambda key: key.replace("/0/", "/") if key.startswith("extension_triggers/") else key)
    before = cut.read_bytes()
    code, _, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    said = [line for line in err.splitlines() if not line.startswith("dbrdist: ")]
    assert code == 2 and len(said) == 1 and "Traceback" not in err
    assert "snapshot_iter_2" in said[0] and "extension_triggers/" in said[0]
    assert cut.read_bytes() == before


def test_extensions_that_were_not_there_start_anew(run, cut):
    """Without any entry of an extension and its trigger: the version that saved had none."""
    gone = ("extensions/WeightAverage", "extension_triggers/SharedSnapshot", "extensions/LogReport")
    gone = (*gone, "extension_triggers/LogReport", "extension_triggers/best")
    renamed(str(cut), lambda key: None if key.startswith(gone) else key)
    code, out, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    assert code == 0, err
    assert "continuing from" in out and os.path.exists("result/snapshot_iter_4")
    assert int(read_npz("result/snapshot_iter_4")["updater/iteration"]) == 4


def test_what_nobody_takes_is_refused_by_name(run, cut):
    renamed(str(cut), lambda key: key + "_of_old" if key == "updater/iterator:main/epoch" else key)
    code, _, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    assert code == 2 and "updater/iterator:main/epoch" in err and "Traceback" not in err


def test_a_renamed_snapshot_is_read_as_it_was_written(cut):
    before = read_npz(str(cut))
    renamed(str(cut), lambda key: key)
    after = read_npz(str(cut))
    assert set(before) == set(after)
    assert all(np.array_equal(before[key], after[key]) for key in before)
