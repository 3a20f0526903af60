"""What each way to send fewer bytes, or to keep less memory, does to accuracy: ten epochs of CIFAR-10 each.

Run under mpiexec. All ways train the same small residual network from the same values, on the same images in the same
order, with the same learning rates. What is evaluated is the mean of all ranks' parameters and running statistics.
Plain training with two more seeds shows how far a run is from another by chance. Data: a folder with ``train/CLASS/``
and ``test/CLASS/``, as for examples/cifar10.

    mpiexec -n 2 python benchmarks/compression_accuracy.py --data cifar10 --record
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from datetime import date
from typing import Any

import harness
import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.core.model.chain import Chain, ChainList
from dbrdist.datasets import ImageFolder, block_bounds
from dbrdist.models.blocks import Basic

NAME = "compression-accuracy"  # of the record
BATCH = 128  # of all ranks
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
WARMUP_EPOCHS = 1  # from a tenth of the rate; afterwards it falls to zero in a straight line
LOCAL_STEPS, MICRO_BATCHES = 8, 2
CHANNELS = (16, 32, 64)
MEAN, STD = (np.float32([[[c]] for c in cs]) for cs in ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]))

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, seed 1": {"seed": 1},
    "plain, seed 2": {"seed": 2},
    "float16 transfer": {"wire": "float16"},
    "bfloat16 transfer": {"wire": "bfloat16"},
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "PowerSGD rank 2": {"compression": functools.partial(PowerSGD, 2)},
    "PowerSGD rank 4": {"compression": functools.partial(PowerSGD, 4)},
    "top 1 %": {"compression": functools.partial(TopK, 0.01)},
    "accumulate=2": {"accumulate": MICRO_BATCHES},
    "local_steps=8": {"local_steps": LOCAL_STEPS},
    "double_buffering": {"double_buffering": True},
}


class Net(Chain):
    """A residual network of 8 layers; the first one halves the image."""

    def __init__(self) -> None:
        super().__init__()
        ins = (CHANNELS[0], *CHANNELS)
        blocks = [Basic(i, o, 1 if k == 0 else 2) for k, (i, o) in enumerate(zip(ins, CHANNELS))]
        with self.init_scope():
            self.conv = L.Convolution2D(3, CHANNELS[0], 3, stride=2, pad=1, nobias=True)
            self.bn = L.BatchNormalization(CHANNELS[0])
            self.blocks = ChainList(*blocks)
            self.fc = L.Linear(CHANNELS[-1], 10)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


def images(comm: Any, folder: str) -> tuple[Any, Any]:
    """All images of a folder as (N, 3, 32, 32) of uint8, and their labels; each rank decodes its part for all."""
    dataset = ImageFolder(folder, transform=None)
    begin, end = block_bounds(len(dataset), comm.rank, comm.size)
    examples = [dataset[i] for i in range(begin, end)]
    pixels = np.stack([image for image, _ in examples]).astype(np.uint8)
    if pixels.shape[-1] == 3:
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    labels = np.array([label for _, label in examples], np.int32)
    return np.concatenate(comm.allgather(pixels)), np.concatenate(comm.allgather(labels))


def shifted(pixels: Any, rng: Any) -> Any:
    """Each image moved by up to a pixel, and mirrored at random."""
    padded = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (32, 32), axis=(2, 3))
    n = np.arange(len(pixels))
    found = windows[n, :, rng.integers(0, 3, len(n)), rng.integers(0, 3, len(n))]
    is_mirrored = rng.random(len(n)) < 0.5
    found[is_mirrored] = found[is_mirrored, :, :, ::-1]
    return found


def normalized(pixels: Any) -> Any:
    return ((pixels - MEAN) / STD).astype(dbrdist.get_dtype())


def rate(epoch: float, num_epochs: int) -> float:
    """The learning rate at a point of the training."""
    if epoch < WARMUP_EPOCHS:
        return LR * (0.1 + 0.9 * epoch / WARMUP_EPOCHS)
    return LR * (num_epochs - epoch) / (num_epochs - WARMUP_EPOCHS)


def train(comm: Any, data: Any, num_epochs: int, seed: int, options: dict[str, Any]) -> tuple[Any, Any, float]:
    """The network after training, its optimizer, and the mean loss of this rank in the last epoch."""
    pixels, labels = data
    dbrdist.random.set_seed(seed)
    model = L.Classifier(Net())
    model.compute_accuracy = False
    actual = optimizers.NesterovAG(lr=LR, momentum=MOMENTUM)
    optimizer = create_multi_node_optimizer(actual, comm, **options).setup(model)
    optimizer.add_hook(optimizers.WeightDecay(WEIGHT_DECAY))
    num_steps = len(pixels) // BATCH
    losses: list[float] = []
    for epoch in range(num_epochs):
        rng = np.random.default_rng((seed, epoch))
        order, losses = rng.permutation(len(pixels)), []
        for step in range(num_steps):
            actual.lr = rate(epoch + step / num_steps, num_epochs)
            chosen = order[step * BATCH : (step + 1) * BATCH]
            x, t = normalized(shifted(pixels[chosen], rng)), labels[chosen]
            begin, end = block_bounds(BATCH, comm.rank, comm.size)
            for part in np.array_split(np.arange(begin, end), options.get("accumulate", 1)):
                optimizer.update(model, x[part], t[part], num_samples=len(part))
                losses.append(float(model.loss.array))
    return model, optimizer, float(np.mean(losses))


def accuracy(comm: Any, model: Any, data: Any) -> float:
    """Of the mean of all ranks' networks, on the test images."""
    for p in model.params():
        p.array = comm.allreduce(p.array) / comm.size
    for link in model.links():
        if isinstance(link, L.BatchNormalization):
            link.avg_mean = comm.allreduce(link.avg_mean) / comm.size
            link.avg_var = comm.allreduce(link.avg_var) / comm.size
    pixels, labels = data
    begin, end = block_bounds(len(pixels), comm.rank, comm.size)
    right = 0
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        for i in range(begin, end, 500):
            part = slice(i, min(i + 500, end))
            scores = model.predictor(normalized(pixels[part])).array
            right += int((scores.argmax(axis=1) == labels[part]).sum())
    return float(comm.allreduce(np.array(right))) / len(pixels)


def sent_bytes(comm: Any, model: Any, optimizer: Any, options: dict[str, Any], num_steps: int) -> float:
    """What one rank sends in a step: rings for reductions, to everyone for top-k."""
    ring, compression = 2 * (comm.size - 1) / comm.size, options.get("compression")
    if isinstance(compression, TopK):
        return float(compression.num_bytes) / num_steps * (comm.size - 1)
    if compression is not None:
        return ring * float(compression.num_bytes) / num_steps
    width = 2 if comm.get_config("allreduce_grad_dtype") is not None else 4
    return ring * width * sum(p.size for p in model.params()) / options.get("local_steps", 1)


def measured(world: Any, way: dict[str, Any], found: dict[str, Any], num_epochs: int) -> dict[str, Any]:
    """One way's training and what came of it."""
    options = {name: value() if callable(value) else value for name, value in way.items()}
    seed, wire = options.pop("seed", 0), options.pop("wire", None)
    settings = {} if wire is None else {"shared_memory": False, "allreduce_grad_dtype": wire}
    comm = create_communicator("flat", **settings)  # in memory that ranks share gradients would not travel
    began = time.perf_counter()
    model, optimizer, loss = train(comm, found["train"], num_epochs, seed, options)
    seconds = time.perf_counter() - began
    num_steps = num_epochs * (len(found["train"][0]) // BATCH)
    result = {
        "commit": harness.commit(),
        "test_accuracy": accuracy(comm, model, found["test"]),
        "train_loss_of_last_epoch": float(np.mean(world.allgather_obj(loss))),
        "seconds": seconds,
        "sent_bytes_per_step": sent_bytes(comm, model, optimizer, options, num_steps),
    }
    comm.finalize()
    return result


def recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """The ways that were recorded today with the same settings."""
    path = harness.RECORDS / f"{NAME}-{date.today().isoformat()}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    return dict(content["results"]) if content.get("settings") == settings else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="the folder with train/ and test/")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--dtype", default="mixedbf16", choices=["float32", "mixedbf16"])
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    dbrdist.global_config.dtype = args.dtype
    world = create_communicator("flat")
    found = {part: images(world, os.path.join(args.data, part)) for part in ("train", "test")}
    settings = {"num_ranks": world.size, "batch": BATCH, "epochs": args.epochs, "lr": LR, "dtype": args.dtype}
    results = recorded(settings) if args.record else {}
    for name in args.ways:
        results[name] = measured(world, WAYS[name], found, args.epochs)
        if world.rank == 0:
            r = results[name]
            print(f"{name:<18} {100 * r['test_accuracy']:.2f} %, loss {r['train_loss_of_last_epoch']:.4f}, sent "
                  f"{r['sent_bytes_per_step']:,.0f} bytes a step, {r['seconds']:.0f} s", flush=True)  # fmt: skip
            if args.record:  # after each: a run of an hour may be cut off, and gone on with by --ways
                harness.record(NAME, settings, {way: results[way] for way in WAYS if way in results})


if __name__ == "__main__":
    main()
