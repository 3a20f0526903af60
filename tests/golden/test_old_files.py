"""Files and import paths of version b1df9a7, before its modules moved, still serve: ``b1df9a7/make.py`` wrote them."""

from __future__ import annotations

import importlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist import Link, serializers

OLD = Path(__file__).with_name("b1df9a7")
FACTS = json.loads((OLD / "facts.json").read_text())
# Whose classes are found by name in pickles and in programs that users wrote.
PUBLIC = ("datasets", "distributions", "functions", "links", "models", "optimizers", "training")


def old(name: str):
    return pickle.loads((OLD / name).read_bytes())


def test_links_are_unpickled_with_their_values():
    expected = np.load(OLD / "links.npz")
    found = {
        f"{name}/{key}": p.array
        for name, link in old("links.pickle").items()
        for key, p in link.namedparams()
        if p.is_initialized
    }
    assert sorted(found) == sorted(expected.files) and len(found) > 20
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_unpickled_links_compute():
    link = old("links.pickle")["sequential"]
    assert isinstance(link, Link)
    y = link(np.zeros((2, 3, 8, 8), np.float32))
    assert y.shape == (2, 5) and np.isfinite(y.array).all()


def test_datasets_are_unpickled():
    data = old("datasets.pickle")
    assert [int(t) for _, t in data["tuple"]] == [0, 1, 2, 3, 4, 5]
    assert [int(t) for _, t in data["sub"]] == [1, 2, 3]
    assert sorted(int(t) for part in data["split"] for _, t in part) == [0, 1, 2, 3, 4, 5]
    assert len(data["concatenated"]) == 12 and data["dict"][2]["x"].tolist() == [4.0, 5.0]


def test_objects_whose_classes_got_settings_do_what_they_did():
    made = old("settled_later.pickle")
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(made["resnet"](made["x"]).array, made["y"], rtol=0, atol=1e-5 * abs(made["y"]).max())
    made["resnet"](made["x"])  # with the statistics of the batch
    augmented = made["augment"]((made["image"], 0), np.random.default_rng(3))[0]
    np.testing.assert_array_equal(augmented, made["augmented"])
    iterator = pickle.loads(made["iterator"])
    assert not iterator.is_synchronized
    assert [next(iterator) for _ in range(4)] == made["batches"]


@pytest.mark.parametrize("name", ["serial", "unshuffled"])
def test_iterators_go_on_where_they_were(name):
    assert [int(i) for i in next(old("iterators.pickle")[name])] == FACTS["batches"][name]


def test_an_optimizer_is_unpickled_and_loaded():
    optimizer = old("optimizer.pickle")
    assert optimizer.t == 1
    fresh = dbrdist.optimizers.Adam().setup(dbrdist.links.Linear(3, 2))
    serializers.load_npz(OLD / "optimizer.npz", fresh)
    assert fresh.t == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(FACTS["names"]))
def test_every_old_import_path_leads_to_a_module(module):
    assert importlib.import_module(module) is sys.modules[module]


@pytest.mark.slow
def test_old_import_paths_have_the_public_names():
    absent = [
        f"{module}.{name}"
        for module, names in FACTS["names"].items()
        for name in names
        if module.split(".")[1:2]
        and module.split(".")[1] in PUBLIC
        and not hasattr(importlib.import_module(module), name)
    ]
    assert absent == []


@pytest.mark.programs
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_is_resumed_and_evaluated(tmp_path, num_ranks):
    run = tmp_path / f"run_of_{num_ranks}"
    shutil.copytree(OLD / run.name, run)
    train = [sys.executable, "-m", "dbrdist.cli.train"]
    command = [*train, str(run / "config.yaml"), "--resume", "epochs=3", f"out={run}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3] and log[2]["main/loss"] < log[1]["main/loss"]
    done = subprocess.run([*train, "--evaluate", str(run)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
