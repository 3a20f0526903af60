"""Launches, bytes and arithmetic of complete steps on a GPU, counted without one (tests/gpu/counting.py).

A launch belongs to one of the classes cudnn, own (kernels/gpu/cuda), cublas (products of matrices) and cupy (all other
kernels of CuPy). Bytes are those of all arrays that a launch is given, each once: what stays in a cache between two
launches is counted twice. The host's time is processor time of the whole step with launches that do nothing, and has
the stand-in's share in it: compare it on one machine only.

    python benchmarks/gpu/launches.py
    python benchmarks/gpu/launches.py --steps resnet50-mixed16 --batch 128 --names
    python benchmarks/gpu/launches.py --record
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "launch"), str(_ROOT / "benchmarks"), str(_ROOT / "tests" / "gpu")]

import counting  # noqa: E402


class Step(NamedTuple):
    """A network, the shape of its input, and in which types it is trained."""

    make: Callable[[], Any]
    shape: tuple[int, ...]  # without the examples
    num_classes: int
    mode: str
    batch: int
    forward: Callable[[Any, Any], Any] = lambda net, x: net(x)
    is_fused: bool = False  # config.fused_convolutions


def steps() -> dict[str, Step]:
    """The steps that are counted, by name."""
    import whole_models

    import dbrdist.links as L
    from dbrdist.models import resnet

    return {
        "mlp-float32": Step(_mlp, (8,), 8, "float32", 8),
        "resnet20-float32": Step(lambda: resnet.ResNet20(10), (3, 32, 32), 10, "float32", 128),
        "resnet50-float32": Step(lambda: resnet.ResNet50(1000), (3, 224, 224), 1000, "float32", 16),
        "resnet50-mixed16": Step(lambda: resnet.ResNet50(1000), (3, 224, 224), 1000, "mixed16", 128),
        "resnet50-mixed16-fused": Step(
            lambda: resnet.ResNet50(1000), (3, 224, 224), 1000, "mixed16", 128, is_fused=True
        ),
        "lstm-float32": Step(lambda: whole_models.Recurrent(650, 2), (35, 650), 0, "float32", 20),
        "lstm-mixed16": Step(lambda: whole_models.Recurrent(650, 2), (35, 650), 0, "mixed16", 20),
        "transformer-float32": Step(lambda: L.TransformerBlock(256, 4), (64, 256), 0, "float32", 8),
        "transformer-mixed16": Step(lambda: L.TransformerBlock(256, 4), (64, 256), 0, "mixed16", 8),
    }


def _mlp() -> Any:
    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import Sequential

    return Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8))


def prepared(step: Step, batch: int | None = None) -> Callable[[], None]:
    """A function that trains the network once, after its first two steps."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F
    from dbrdist import optimizers

    batch = step.batch if batch is None else batch
    dbrdist.config.fused_convolutions = step.is_fused
    dbrdist.config.dtype = "mixed16" if step.mode == "mixed16" else np.dtype(step.mode)
    dtype = np.dtype("f2" if step.mode == "mixed16" else step.mode)
    place = dbrdist.get_device("@cupy:0")
    net = step.make().to_device(place)
    optimizer = optimizers.MomentumSGD(0.001, 0.9).setup(net)
    x = place.xp.empty((batch, *step.shape), dtype)
    if len(step.shape) == 3:
        x = place.send(np.empty((batch, *step.shape), dtype))
    t = place.xp.zeros(batch, np.int32)

    def run() -> None:
        y = step.forward(net, x)
        if step.num_classes:
            loss = F.softmax_cross_entropy(y, t)
        else:
            loss, y.grad = y, y.array
        net.cleargrads()
        loss.backward()
        optimizer.update()

    run()
    run()  # batch normalization has seen by now that a ReLU follows
    return run


def count(step: Step, batch: int | None = None) -> counting.Counts:
    """What one step launches."""
    run = prepared(step, batch)
    with counting.counted() as counts:
        run()
    return counts


def seconds_of_host(step: Step, rounds: int, batch: int | None = None) -> float:
    """Processor time of a step, the least of some."""
    run, least = prepared(step, batch), float("inf")
    for _ in range(rounds):
        with counting.counted() as counts:
            run()
        least = min(least, counts.host_seconds)
    return least


def main() -> None:
    import harness

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    counting.install()
    known = steps()
    parser.add_argument("--steps", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--batch", type=int, help="default: that of the step")
    parser.add_argument("--names", action="store_true", help="list the kernels")
    parser.add_argument("--host", type=int, default=0, metavar="ROUNDS", help="measure the host's time, too")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results = {}
    for name in args.steps:
        counts = count(known[name], args.batch)
        result = results[name] = {
            **counts.by_class(), "num_copies": counts.num_copies, "num_allocations": counts.num_allocations,
            "num_bytes": counts.num_bytes(), "flops": counts.flops, "batch": args.batch or known[name].batch,
        }  # fmt: skip
        kinds = ", ".join(f"{result[kind]} {kind}" for kind in counting.CLASSES)
        print(f"{name + ', batch ' + str(result['batch']):<34} {result['launches']:5} launches ({kinds}), "
              f"{result['num_copies']} copies, {result['num_allocations']} allocations, "
              f"{result['num_bytes'] / 1e9:.2f} GB, {result['flops'] / 1e12:.3f} TFLOP", flush=True)  # fmt: skip
        if args.names:
            for kind, kernel, num, size in counts.names():
                print(f"    {kind:<7} {kernel:<28} {num:5} {size / 1e9:9.3f} GB")
        if args.host:
            result["host_seconds"] = seconds_of_host(known[name], args.host, args.batch)
            print(f"    host {result['host_seconds'] * 1e3:.2f} ms")
    if args.record:
        print(harness.record("gpu-launches", {"steps": args.steps}, results))


if __name__ == "__main__":
    main()
