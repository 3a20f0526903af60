"""docs/inference.md: its blocks run one after the other, and what it says of files and threads is so."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.errors import CheckpointError

PAGE = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the blocks leave behind."""
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(compile(block, "inference.md", "exec"), found)
    return found


def test_the_blocks_run_and_say_what_they_do(names, capsys):
    network, images, labels = names["network"], names["images"], names["labels"]
    assert (names["classes"] == labels).mean() > 0.85
    trained = names["model"].predictor
    for (name, ours), (_, theirs) in zip(network.namedparams(), trained.namedparams(), strict=True):
        np.testing.assert_array_equal(ours.array, theirs.array, err_msg=name)
    with np.load("network.npz") as file:
        np.testing.assert_array_equal(file["0/W"], trained[0].W.array)
        h = images @ file["0/W"].T + file["0/b"]  # the network in float64, from the file alone
        h = (h - file["1/avg_mean"]) / np.sqrt(file["1/avg_var"] + 2e-5) * file["1/gamma"] + file["1/beta"]
        y = np.maximum(h, 0).astype(float) @ file["2/W"].T + file["2/b"]  # links count, functions do not
    likely = np.exp(y - y.max(1, keepdims=True))
    np.testing.assert_allclose((likely / likely.sum(1, keepdims=True)).max(1), names["certainty"], rtol=1e-4)
    assert (y.argmax(1) == names["classes"]).all()

    one = names["classify"](network, images, batch=1)  # no image depends on the others
    assert (one[0] == names["classes"]).all()
    np.testing.assert_allclose(one[1], names["certainty"], rtol=1e-5)

    threads, found = [], {}
    for i in range(4):
        work = lambda i=i: found.update({i: names["classify"](network, images)[0]})  # noqa: E731
        threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(found[i] == names["classes"]).all() for i in range(4)] == [True] * 4

    other = dbrdist.Sequential(dbrdist.links.Linear(64, 49))
    with pytest.raises(CheckpointError, match="0/W"):
        dbrdist.serializers.load_npz(names["snapshot"], other, path="updater/model:main/predictor/")
