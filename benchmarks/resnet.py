"""A full training step, or inference, of ResNet-50 (224 x 224) or ResNet-20 (32 x 32), against PyTorch channels-last.

A training step is forward, backward and momentum update, on the CPU, in float32 or with float32 parameters and
bfloat16 activations (``mixedbf16``; PyTorch's autocast). With the interpreter of an environment into which dbrdist was
installed it is measured as users have it, compiled, which counts for small images. Goals, as parts of PyTorch's time:

    python benchmarks/resnet.py --torch-python TORCH_VENV/bin/python --record                                     # 0.78
    python benchmarks/resnet.py ... --batch 1 --inference                                                         # 0.9
    python benchmarks/resnet.py ... --dtype mixedbf16                                                             # 0.87
    python benchmarks/resnet.py ... --model resnet20 --batch 128                                                  # 0.80
    python benchmarks/resnet.py ... --model resnet20 --batch 128 --dtype mixedbf16                                # 0.67
    python benchmarks/resnet.py ... --model resnet20 --batch 1 --rows 8                                           # 0.7
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness

SIZES = {"resnet50": (224, 1000), "resnet20": (32, 10)}  # rows of an image, number of classes


def dbrdist_step(model: str, batch: int, rows: int, dtype: str, inference: bool) -> Callable[[], Any]:
    """One training step or inference with dbrdist, written with links as a user writes it."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.models import resnet

    dbrdist.config.dtype = dtype
    num_classes = SIZES[model][1]
    net = {"resnet50": resnet.ResNet50, "resnet20": resnet.ResNet20}[model](num_classes)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, 3, rows, rows), np.float32).astype(dbrdist.get_dtype())
    t = rng.integers(0, num_classes, batch)
    if inference:
        dbrdist.config.train = dbrdist.config.enable_backprop = False
        return lambda: net(x).array
    optimizer = optimizers.MomentumSGD(0.001, 0.9).setup(net)

    def step() -> None:
        loss = F.softmax_cross_entropy(net(x), t)
        net.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def torch_step(model: str, batch: int, rows: int, dtype: str, inference: bool) -> Callable[[], Any]:
    """The same with PyTorch eager, mixed types with autocast."""
    import torch
    import torch_resnet

    num_classes = SIZES[model][1]
    net = {"resnet50": torch_resnet.resnet50, "resnet20": torch_resnet.resnet20}[model](num_classes)
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, rows, rows).contiguous(memory_format=torch.channels_last)
    t = torch.randint(0, num_classes, (batch,))

    def loss_of(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "mixedbf16"):
            return net(x) if inference else torch.nn.functional.cross_entropy(net(x), t)

    if inference:
        net.eval()
        return torch.inference_mode()(lambda: loss_of(x))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    def step() -> None:
        loss = loss_of(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--model", choices=list(SIZES), default="resnet50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, help="of an image; default 224 for ResNet-50, 32 for ResNet-20")
    parser.add_argument("--dtype", choices=["float32", "mixedbf16"], default="float32")
    parser.add_argument("--inference", action="store_true", help="forward alone, without a graph")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"step": dbrdist_step if args.worker == "dbrdist" else torch_step})
        return
    installed = harness.is_installed()
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", args.threads, installed=installed)}
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch", args.threads)
    rows = args.rows or SIZES[args.model][0]
    arguments = {
        "model": args.model, "batch": args.batch, "rows": rows, "dtype": args.dtype, "inference": args.inference,
    }  # fmt: skip
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
        print(harness.record(_name(**arguments), settings, results, versions))


def _name(model: str, batch: int, rows: int, dtype: str, inference: bool) -> str:
    """The record's name: the model, and what differs from its usual case."""
    parts = [
        model, f"{rows}x{rows}" * (rows != SIZES[model][0]), f"batch{batch}" * (batch == 1),
        dtype * (dtype != "float32"), "inference" * inference,
    ]  # fmt: skip
    return "-".join(part for part in parts if part)


if __name__ == "__main__":
    main()
