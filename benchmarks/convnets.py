"""convnet-benchmarks (Chintala 2014; table 1 of Chainer's paper): forward and backward of five convolutions and of
AlexNet, OverFeat and VGG-A, against PyTorch channels-last, one thread. Goal: at most 1.0 of PyTorch's time in each.

    python benchmarks/convnets.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/convnets.py --rows conv5 alexnet --batch 8

The original batch sizes are 128 (64 for VGG-A); a CPU takes ``--batch`` examples. Without dropout and normalization.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness

# The five layers: channels in, channels out, kernel, side of the image.
LAYERS = {
    "conv1": (3, 96, 11, 128), "conv2": (64, 128, 9, 64), "conv3": (128, 128, 9, 32), "conv4": (128, 128, 7, 16),
    "conv5": (384, 384, 3, 13),
}  # fmt: skip
# The networks: side of the image, convolutions (outputs, kernel, stride, pad) with "P" (size, stride) for max pooling,
# units of the hidden linear layers.
NETWORKS: dict[str, tuple[int, list[Any], list[int]]] = {
    "alexnet": (
        224,
        [(64, 11, 4, 2), ("P", 3, 2), (192, 5, 1, 2), ("P", 3, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1),
         ("P", 3, 2)],
        [4096, 4096],
    ),
    "overfeat": (
        231,
        [(96, 11, 4, 0), ("P", 2, 2), (256, 5, 1, 0), ("P", 2, 2), (512, 3, 1, 1), (1024, 3, 1, 1), (1024, 3, 1, 1),
         ("P", 2, 2)],
        [3072, 4096],
    ),
    "vgg-a": (
        224,
        [(64, 3, 1, 1), ("P", 2, 2), (128, 3, 1, 1), ("P", 2, 2), (256, 3, 1, 1), (256, 3, 1, 1), ("P", 2, 2),
         (512, 3, 1, 1), (512, 3, 1, 1), ("P", 2, 2), (512, 3, 1, 1), (512, 3, 1, 1), ("P", 2, 2)],
        [4096, 4096],
    ),
}  # fmt: skip
ROWS = (*LAYERS, *NETWORKS)


def dbrdist_step(row: str, batch: int) -> Callable[[], Any]:
    """Forward and backward with dbrdist."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F
    import dbrdist.links as L

    rng = np.random.default_rng(0)
    if row in LAYERS:
        channels, outputs, kernel, side = LAYERS[row]
        model: Any = L.Convolution2D(channels, outputs, kernel)
        x = dbrdist.Variable(rng.standard_normal((batch, channels, side, side), np.float32))
    else:
        side, convolutions, units = NETWORKS[row]
        parts: list[Any] = []
        for entry in convolutions:
            if entry[0] == "P":
                parts.append(lambda h, k=entry[1], s=entry[2]: F.max_pooling_2d(h, k, s, cover_all=False))
            else:
                outputs, kernel, stride, pad = entry
                parts += [L.Convolution2D(None, outputs, kernel, stride, pad), F.relu]
        for n in units:
            parts += [L.Linear(None, n), F.relu]
        model = dbrdist.Sequential(*parts, L.Linear(None, 1000))
        x = dbrdist.Variable(rng.standard_normal((batch, 3, side, side), np.float32), requires_grad=False)

    def step() -> None:
        model.cleargrads()
        x.cleargrad()
        y = model(x)
        y.grad = np.ones_like(y.array)
        y.backward()

    return step


def torch_step(row: str, batch: int) -> Callable[[], Any]:
    """The same with PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    if row in LAYERS:
        channels, outputs, kernel, side = LAYERS[row]
        model: Any = nn.Conv2d(channels, outputs, kernel)
        x = torch.randn(batch, channels, side, side)
    else:
        side, convolutions, units = NETWORKS[row]
        parts: list[Any] = []
        for entry in convolutions:
            if entry[0] == "P":
                parts.append(nn.MaxPool2d(entry[1], entry[2]))
            else:
                outputs, kernel, stride, pad = entry
                parts += [nn.LazyConv2d(outputs, kernel, stride, pad), nn.ReLU()]
        parts.append(nn.Flatten())
        for n in units:
            parts += [nn.LazyLinear(n), nn.ReLU()]
        model = nn.Sequential(*parts, nn.LazyLinear(1000))
        x = torch.randn(batch, 3, side, side)
        model(x)
    model = model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_(row in LAYERS)

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        x.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"step": dbrdist_step if args.worker == "dbrdist" else torch_step})
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", installed=harness.is_installed())}
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch")
    results: dict[str, Any] = {}
    for row in args.rows:
        found = harness.compare(
            workers, "step", num_rounds=args.rounds, arguments={"row": row, "batch": args.batch}
        )  # fmt: skip
        results[row] = found
        words = ", ".join(f"{label} {r['median_seconds'] * 1e3:.1f} ms" for label, r in found.items())
        if "torch" in found:
            found["ratio"] = found["dbrdist"]["median_seconds"] / found["torch"]["median_seconds"]
            words += f", ratio {found['ratio']:.3f}"
        print(f"{row:<9} {words}", flush=True)
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        print(harness.record("convnets", {"batch": args.batch, "num_rounds": args.rounds}, results, about))


if __name__ == "__main__":
    main()
