"""The plan of a run, line by line."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import dbrdist
from dbrdist.cli.builders import plan
from dbrdist.kernels.cpu import onednn
from dbrdist.links import Linear
from tests.cli.config_helpers import config
from tests.each import each

TEXT = "model: mlp\ndata: digits\nbatch: 100\nepochs: 2.5\n"


class Net(dbrdist.Chain):
    """Matrices of 12 and 6 numbers, vectors of 3 and 2."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = Linear(4, 3)
            self.l2 = Linear(3, 2)


def made(num_train=1050, num_test=1, network=Net, device=None):
    task = dbrdist.Chain(predictor=network())
    test = None if num_test is None else range(num_test)
    return SimpleNamespace(data=SimpleNamespace(train=range(num_train), test=test), task=task, device=device)


MODEL, DATA = "model: mlp, 23 parameters of float32", "data: digits, 1,050 training examples, 1 test example"
BATCH, STEPS, END = "batch: 100", "steps: 11 per epoch, about 28 in all", "seed: 0; out: result"
SENT = "; 92 bytes per allreduce"


@each(
    **{
        "words, size, lines": [
            ([], 1, [MODEL, DATA, BATCH, STEPS, END]),
            ([], 2, [MODEL, DATA, "ranks: 2; batch: 100, that is 50 per rank", STEPS + SENT, END]),
            ([], 3, [MODEL, DATA, "ranks: 3; batch: 100, that is 33.3333 per rank", STEPS + SENT, END]),
            (
                ["batch={virtual_workers: 4, per_worker: 25}"], 1,
                [MODEL, DATA, "ranks: 1; batch: 100, that is 4 virtual workers of 25", STEPS + SENT, END],
            ),
            (
                ["batch={virtual_workers: 1, per_worker: 100}", "reproducible=true"], 1,
                [MODEL, DATA, "ranks: 1; batch: 100, that is 1 virtual worker of 100, reproducible with 1 thread per "
                 "rank", STEPS + SENT, END],
            ),
            (
                ["accumulate=3"], 1,
                [MODEL, DATA, BATCH, STEPS,
                 "accumulate: 1 batch left over at step 28, without the update that takes 3", END],
            ),
            (["accumulate=4"], 1, [MODEL, DATA, BATCH, STEPS, END]),
            (["last_batch=wrap"], 1, [MODEL, DATA, BATCH, "steps: 10.5 per epoch, about 27 in all", END]),
            (["last_batch=drop"], 1, [MODEL, DATA, BATCH, "steps: 10 per epoch, about 25 in all", END]),
            (["iterations=10"], 1, [MODEL, DATA, BATCH, "steps: 11 per epoch, about 10 in all", END]),
            (["iterations=99", "seed=7", "out=a/b"], 1, [MODEL, DATA, BATCH, STEPS, "seed: 7; out: a/b"]),
            (["batch=1"], 1, [MODEL, DATA, "batch: 1", "steps: 1,050 per epoch, about 2,625 in all", END]),
            (["dtype=mixed16"], 1, [MODEL + ", activations of float16", DATA, BATCH, STEPS, END]),
            (["dtype=float64"], 1, [MODEL.replace("float32", "float64"), DATA, BATCH, STEPS, END]),
            (
                ["optimizer={name: sgd, lr: 0.1, hooks: [{name: weight_decay, rate: 1e-4, only: ['*/W']}]}"], 1,
                [MODEL, DATA, BATCH, "weight_decay 0.0001: 2 parameters, 18 numbers: /l1/W, /l2/W",
                 "no decay: 2 parameters, 5 numbers: /l1/b, /l2/b", STEPS, END],
            ),
            (
                ["optimizer={name: sgd, lr: 0.1, hooks: [{name: weight_decay, rate: 0.1, skip: ['/l1/b']}, "
                 "{name: weight_decay, rate: 0.5}, {name: gradient_clipping, threshold: 1}]}"], 1,
                [MODEL, DATA, BATCH, "weight_decay 0.1: 3 parameters, 20 numbers: /l1/W, /l2/W, /l2/b",
                 "weight_decay 0.5: 4 parameters, 23 numbers: /l1/W, /l1/b, /l2/W, /l2/b", STEPS, END],
            ),
            (
                ["optimizer={name: sgd, lr: 0.1, hooks: [{name: weight_decay, rate: 0.1}]}"], 1,
                [MODEL, DATA, BATCH, STEPS, END],
            ),
        ]
    }
)  # fmt: skip
def test_the_whole_plan(words, size, lines):
    assert plan.describe(config(TEXT, *words), made(), size) == lines


def test_data_without_a_test_and_of_one_example():
    lines = plan.describe(config(TEXT), made(1, None), 1)
    assert lines[1] == "data: digits, 1 training example, no evaluation"


def test_vectors_that_an_optimizer_leaves_without_decay():
    text = f"{TEXT}optimizer: {{name: lars, lr: 1.0, weight_decay: 0.0005, skip_vectors: true}}\n"
    assert plan.decay_groups(config(text), made()) == [
        "weight_decay 0.0005: 2 parameters, 18 numbers: /l1/W, /l2/W",
        "no decay: 2 parameters, 5 numbers: /l1/b, /l2/b",
    ]


def test_of_many_parameters_eight_are_named():
    listed = {f"/{k}": np.zeros(2) for k in range(9)}
    names = "/0, /1, /2, /3, /4, /5, /6, /7"
    assert plan._listed(listed) == f"9 parameters, 18 numbers: {names}, and 1 more"
    del listed["/8"]
    assert plan._listed(listed) == f"8 parameters, 16 numbers: {names}"
    assert plan._listed({"/0": np.zeros(1)}) == "1 parameter, 1 number: /0"


def test_convolutions_on_a_gpu_without_cudnn_are_said(monkeypatch):
    def library():
        raise onednn.Unavailable("not installed")

    def network():
        return dbrdist.links.Convolution2D(1, 1, 3)

    monkeypatch.setattr(plan.cudnn, "library", library)
    words = (
        "cuDNN is missing (not installed): convolutions are computed as matrix products, several times as slowly; "
        "install dbrdist[cudnn13x] for CUDA 13, or dbrdist[cudnn12x] for CUDA 12"
    )
    assert plan.without_cudnn(made(network=network, device="gpu")) == [words]
    assert plan.without_cudnn(made(network=network)) == plan.without_cudnn(made(device="gpu")) == []
    monkeypatch.setattr(plan.cudnn, "library", lambda: None)
    assert plan.without_cudnn(made(network=network, device="gpu")) == []
