"""Memory of the device: the largest is in the log, a step's is foretold, and running out of it is explained."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from test_gpu_cli import train as train  # the fixture

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Sequential, datasets, iterators, optimizers, training
from dbrdist.core.array.gpu import device_memory


@pytest.fixture
def whole(on):
    """Arrays in memory that has a limit."""
    if on != "whole":
        pytest.skip("needs memory with a limit")
    import whole

    yield whole
    whole.limit.num_bytes = None


def test_logs_and_summaries_have_the_largest_memory(train, on, tmp_path, capsys):
    if on in ("numpy", "stand-in"):
        pytest.skip("takes no memory of a device")
    log = train("there", "device=gpu", "iterations=3")
    sizes = [entry["device_memory_bytes"] for entry in log]
    assert sizes == sorted(sizes) and sizes[0] > 100_000
    assert json.loads((tmp_path / "there" / "summary.json").read_text())["device_memory_bytes"] >= sizes[-1]
    (rank,) = (tmp_path / "there" / "ranks").iterdir()
    assert json.loads(rank.read_text())["device_memory_bytes"] >= sizes[0]
    assert "GPU memory" in (tmp_path / "there" / "report" / "index.html").read_text()
    plan = capsys.readouterr().out
    assert "GPU memory: about " in plan and "GB free on @cupy:0" in plan


def test_a_run_without_memory_ends_with_sizes_and_a_batch(train, whole, tmp_path, capfd):
    log = train("enough", "device=gpu", "iterations=2")
    least = log[-1]["device_memory_bytes"]
    gc.collect()  # what other tests have left would become free in between
    whole.limit.num_bytes = whole.used_bytes() + least // 2
    train("scarce", "device=gpu", "iterations=2")
    text = capfd.readouterr().err
    assert "OutOfMemoryError: Out of memory allocating" in text and "a step with 100 examples asked for" in text
    assert "For this run: a batch of " in text
    assert json.loads((tmp_path / "scarce" / "summary.json").read_text())["status"] == "failed"


def test_the_bound_of_the_batch_holds(device, whole, rng):
    """A step of half as many examples as the bound runs where the whole batch does not."""

    def step(batch):
        net = Sequential(L.Linear(64, 256), F.relu, L.Linear(256, 256), F.relu, L.Linear(256, 2))
        data = datasets.TupleDataset(rng.random((256, 64), np.float32), np.zeros(256, np.int32))
        optimizer = optimizers.MomentumSGD().setup(L.Classifier(net))
        updater = training.StandardUpdater(iterators.SerialIterator(data, batch), optimizer, device=device)
        updater.update()
        return whole.used_bytes()

    gc.collect()
    before = whole.used_bytes()
    step(8)
    whole.limit.num_bytes = before + 1_900_000
    with pytest.raises(MemoryError) as info:
        step(256)
    (note,) = info.value.__notes__
    assert "a step with 256 examples" in note and "parameters hold" in note
    assert device_memory.is_out_of_memory(info.value)
    most = int(note.partition("A batch above ")[2].partition(" ")[0].replace(",", ""))
    assert 8 < most < 256
