"""``dbrdist-train`` on the device, in this process."""

from __future__ import annotations

import json
import signal
import sys
import warnings

import pytest

import dbrdist
from dbrdist.core.array import random


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``train(*words)`` runs the digits' recipe for some steps and returns its log."""
    pytest.importorskip("pydantic")
    from dbrdist.cli.train import command

    config = (
        "model: {name: lenet, channels: [8, 16], units: 32, dropout: 0.2}\ndata: digits\nbatch: 100\nepochs: 1\n"
        "optimizer: {name: momentum_sgd, lr: 0.05, hooks: [{name: weight_decay, rate: 5e-4}]}\n"
    )
    (tmp_path / "run.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    dtype, state, hook = dbrdist.global_config.dtype, random.get_state(), sys.excepthook

    def call(out, *words):
        command.main(["run.yaml", f"out={out}", "log.every=1 iteration", *words], standalone_mode=False)
        return [json.loads(line) for line in (tmp_path / out / "log.jsonl").read_text().splitlines()]

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
    dbrdist.global_config.dtype, sys.excepthook = dtype, hook
    random.set_state(state)


def test_the_losses_are_those_of_the_host(train, on):
    device = "cpu" if on == "numpy" else "gpu"
    there, here = train("there", f"device={device}"), train("here", "device=cpu")
    assert len(there) == len(here) == 15
    for a, b in zip(there, here, strict=True):
        assert a["main/loss"] == pytest.approx(b["main/loss"], rel=0.05)
    assert there[-1]["validation/main/accuracy"] == pytest.approx(here[-1]["validation/main/accuracy"], abs=0.05)


def test_float16(train, on):
    """The losses of float32 on the host, within the rounding of 16 bits."""
    half = train("half", f"device={'cpu' if on == 'numpy' else 'gpu'}", "dtype=float16", "iterations=5")
    for a, b in zip(half, train("here", "device=cpu", "iterations=5"), strict=True):
        assert a["main/loss"] == pytest.approx(b["main/loss"], rel=0.02)


def test_captured_steps_are_eager_ones(train, on):
    if on not in ("whole", "cupy"):
        pytest.skip("needs streams that can be captured")
    words = "device=gpu", "deterministic=true", "iterations=8", "model.dropout=0"
    eager, captured = train("eager", *words), train("captured", *words, "graph=true")
    for a, b in zip(eager, captured, strict=True):
        assert a["main/loss"] == pytest.approx(b["main/loss"], rel=1e-5)  # products by cuBLAS and cuBLASLt


@pytest.mark.parametrize(
    ("batch", "reason"),
    [("50", "the model is in host memory"), ("{virtual_workers: 2, per_worker: 25}", "virtual workers make several")],
)
def test_graphs_on_a_cpu_say_that_there_are_none(train, capsys, batch, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        train("there", "device=cpu", "graph=true", "iterations=3", f"batch={batch}")
    found = [line for line in capsys.readouterr().err.splitlines() if "CUDA graph" in line]
    assert len(found) == 1, found
    assert f"runs eagerly: {reason}" in found[0]


def test_a_plan_names_what_is_missing(train, on, capsys):
    """The stand-in has no cuDNN; with --on whole there is one."""
    if on not in ("stand-in", "whole"):
        pytest.skip("watches what the stand-in lacks")
    train("there", "device=gpu", "iterations=1")
    found = " ".join(capsys.readouterr().out.split())
    assert ("cuDNN is missing (ModuleNotFoundError" in found) == (on == "stand-in")
    assert ("install dbrdist[cudnn13x]" in found) == (on == "stand-in")
    assert "go through host memory" not in found  # one rank adds no gradients
