"""A full training step of ResNet-50 (224 x 224) or ResNet-20 (32 x 32), against PyTorch in channels-last memory.

Forward, backward and momentum update in float32 on the CPU. Goal: a ratio of at most 1.0.

    python benchmarks/resnet.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/resnet.py --torch-python TORCH_VENV/bin/python --model resnet20 --batch 128 --record
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness

SIZES = {"resnet50": (224, 1000), "resnet20": (32, 10)}  # rows of an image, number of classes


def dbrdist_step(model: str, batch: int) -> Callable[[], Any]:
    """One training step with dbrdist, written with links as a user writes it."""
    import numpy as np

    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.models import resnet

    size, num_classes = SIZES[model]
    net = {"resnet50": resnet.ResNet50, "resnet20": resnet.ResNet20}[model](num_classes)
    optimizer = optimizers.MomentumSGD(0.001, 0.9).setup(net)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 3, size, size), np.float32)
    t = rng.integers(0, num_classes, batch)

    def step() -> None:
        loss = F.softmax_cross_entropy(net(x), t)
        net.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def torch_step(model: str, batch: int) -> Callable[[], Any]:
    """The same step with PyTorch eager."""
    import torch
    import torch_resnet

    size, num_classes = SIZES[model]
    net = {"resnet50": torch_resnet.resnet50, "resnet20": torch_resnet.resnet20}[model](num_classes)
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    t = torch.randint(0, num_classes, (batch,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(net(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--model", choices=list(SIZES), default="resnet50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"step": dbrdist_step if args.worker == "dbrdist" else torch_step})
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", args.threads)}
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch", args.threads)
    arguments = {"model": args.model, "batch": args.batch}
    results: dict[str, Any] = harness.compare(workers, "step", num_rounds=args.rounds, arguments=arguments)
    about = {label: w.ask("about") for label, w in workers.items()}
    for label, w in workers.items():
        w.close()
        r = results[label]
        r["peak_bytes"] = about[label]["peak_bytes"]
        print(f"{label:<8} {r['median_seconds'] * 1e3:8.1f} ms  ({r['min_seconds'] * 1e3:.1f} to "
              f"{r['max_seconds'] * 1e3:.1f}), peak {r['peak_bytes'] / 2**20:.0f} MiB")  # fmt: skip
    if "torch" in results:
        results["ratio"] = results["dbrdist"]["median_seconds"] / results["torch"]["median_seconds"]
        print(f"ratio    {results['ratio']:8.3f}")
    if args.record:
        settings = {**arguments, "num_threads": args.threads, "num_rounds": args.rounds}
        versions = {label: a["versions"] for label, a in about.items()}
        print(harness.record(args.model, settings, results, versions))


if __name__ == "__main__":
    main()
