"""Full training steps on one GPU: a small MLP for the host's share, ResNet-20 and ResNet-50; against PyTorch eager.

Forward, backward and momentum update, on data that lie on the device; float32 convolutions with TF32 on both sides, as
is PyTorch's default, or with --exact on neither, as is dbrdist's. Seconds on the device by CUDA events; for the MLP
also the seconds until the calls have returned, which is what the host needs.

    python benchmarks/gpu/steps.py --record
    python benchmarks/gpu/steps.py --models resnet50 --batches 16 32 64 128 --dtype float16 --torch --record
    python benchmarks/gpu/steps.py --on numpy
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import device
import harness

BATCHES = {"mlp": [8], "resnet20": [128], "resnet50": [16, 32, 64, 128]}
SIZES = {"resnet20": (32, 10), "resnet50": (224, 1000)}  # rows of an image, number of classes


def inputs(model: str, batch: int, is_tiny: bool) -> tuple[tuple[int, ...], int]:
    """Shape of a batch, and the number of classes."""
    if model == "mlp":
        return (batch, 8), 8
    size, num_classes = SIZES[model]
    return (batch, 3, 32 if is_tiny else size, 32 if is_tiny else size), num_classes


def dbrdist_case(
    model: str, batch: int, dtype: str, on: str, launch: bool = False, exact: bool = False
) -> device.Timed:
    """A step with dbrdist, written with links as a user writes it."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import optimizers
    from dbrdist.models import resnet

    dbrdist.config.dtype = "mixed16" if dtype == "float16" else np.dtype(dtype)
    dbrdist.config.use_cudnn_tensor_core = "auto" if exact else "always"
    shape, num_classes = inputs(model, batch, on == "numpy")
    make: dict[str, Callable[[], Any]] = {
        "mlp": lambda: dbrdist.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8)),
        "resnet20": lambda: resnet.ResNet20(num_classes),
        "resnet50": lambda: resnet.ResNet50(num_classes),
    }
    place = device.of(on)
    net = make[model]().to_device(place)
    optimizer = optimizers.MomentumSGD(0.001, 0.9).setup(net)
    rng = np.random.default_rng(0)
    x = place.send(rng.standard_normal(shape, np.float32).astype(dtype))
    t = place.send(rng.integers(0, num_classes, batch).astype(np.int32))

    def step() -> None:
        loss = F.softmax_cross_entropy(net(x), t)
        net.cleargrads()
        loss.backward()
        optimizer.update()

    return device.Timed(step, device.Host() if on == "numpy" else device.Cuda(), launch)


def torch_case(model: str, batch: int, dtype: str, on: str, launch: bool = False, exact: bool = False) -> device.Timed:
    """The same step with PyTorch eager in channels-last memory; float16 by autocast."""
    import torch
    import torch_resnet

    torch.backends.cudnn.allow_tf32 = not exact
    shape, num_classes = inputs(model, batch, on == "numpy")
    nn, place = torch.nn, "cpu" if on == "numpy" else "cuda"
    make: dict[str, Callable[[], Any]] = {
        "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        "resnet20": lambda: torch_resnet.resnet20(num_classes),
        "resnet50": lambda: torch_resnet.resnet50(num_classes),
    }
    memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    net = make[model]().to(place, memory_format=memory)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    x = torch.randn(*shape, device=place).contiguous(memory_format=memory)
    t = torch.randint(0, num_classes, (batch,), device=place)

    def step() -> None:
        with torch.autocast(place, torch.float16, enabled=dtype == "float16"):
            loss = torch.nn.functional.cross_entropy(net(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return device.Timed(step, device.Host() if on == "numpy" else device.TorchCuda(), launch)


def main() -> None:
    parser = device.arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--batches", nargs="+", type=int, help="for all models; default: 8, 128, and 16 to 128")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--exact", action="store_true", help="float32 convolutions without TF32, on both sides")
    parser.add_argument("--torch", action="store_true", help="measure PyTorch too, in this environment")
    parser.add_argument("--torch-python", help="or in the environment of this interpreter")
    parser.add_argument("--worker", help="used by the script itself: dbrdist or torch, and what it runs on")
    args = parser.parse_args()
    if args.worker:
        side, on = args.worker.split(":")
        device.require(on if side == "dbrdist" else "numpy")
        harness.serve({"step": dbrdist_case if side == "dbrdist" else torch_case})
        return
    device.require(args.on)
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, f"dbrdist:{args.on}")}
    if args.torch or args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python or sys.executable, __file__, f"torch:{args.on}")
    results: dict[str, Any] = {}
    for model in args.models:
        for batch in args.batches or ([2] if args.on == "numpy" else BATCHES[model]):
            for launch in (False, True) if model == "mlp" else (False,):
                name = f"{model}, batch {batch}" + (", host" if launch else "")
                results[name] = measure(workers, args, model, batch, launch)
                show(name, results[name], batch)
    settings = {
        "models": args.models, "dtype": args.dtype, "exact": args.exact, "num_rounds": args.rounds,
        "min_seconds": args.seconds,
    }  # fmt: skip
    about = {label: w.ask("about") for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        print(harness.record(f"gpu-steps-{args.dtype}", settings, results, {**about, **device.about(args.on)}))


def measure(workers: dict[str, Any], args: Any, model: str, batch: int, launch: bool) -> dict[str, Any]:
    """Times of one case on each side, and their ratio."""
    return harness.compare(
        workers, "step", num_rounds=args.rounds, min_seconds=args.seconds, calls=20 if model == "mlp" else 3,
        arguments={"model": model, "batch": batch, "dtype": args.dtype, "on": args.on, "launch": launch,
                   "exact": args.exact},
    )  # fmt: skip


def show(name: str, result: dict[str, Any], batch: int) -> None:
    """One line for each side."""
    for label, r in result.items():
        seconds = r["median_seconds"]
        print(f"{name:<26} {label:<8} {seconds * 1e3:10.3f} ms  ({r['min_seconds'] * 1e3:.3f} to "
              f"{r['max_seconds'] * 1e3:.3f}), {batch / seconds:10.0f} examples/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
