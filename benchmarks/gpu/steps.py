"""Full training steps on one GPU, beside PyTorch: a small MLP for the host's share, ResNets, an LSTM, a Transformer.

Forward, backward and momentum update, on data that lie on the device; float32 convolutions with TF32 on both sides, as
is PyTorch's default, or with --exact on neither, as is dbrdist's. Seconds on the device by CUDA events; for the MLP and
batch 16 also the seconds until the calls have returned, which is what the host needs. --graph adds dbrdist's captured
steps, --compile PyTorch's compiled ones. What was measured before an interruption (SIGTERM) is recorded.

    python benchmarks/gpu/steps.py --record
    python benchmarks/gpu/steps.py --models resnet50 --batches 16 128 --dtype float16 --graph --torch --record
    python benchmarks/gpu/steps.py --models resnet50 --torch --compile default max-autotune --record
    python benchmarks/gpu/steps.py --on numpy
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import device
import harness

sys.path.append(str(harness.ROOT / "tests" / "gpu"))  # networks that tests run, too

BATCHES = {"mlp": [8], "resnet20": [128], "resnet50": [16, 32, 64, 128], "lstm": [20], "transformer": [16]}
SIZES = {"resnet20": (32, 10), "resnet50": (224, 1000)}  # rows of an image, number of classes
WORDS = {"lstm": (10_000, 35, 650), "transformer": (10_000, 256, 512)}  # words, steps, units


def inputs(model: str, batch: int, is_tiny: bool) -> tuple[tuple[int, ...], int]:
    """Shape of a batch, and the number of classes."""
    if model == "mlp":
        return (batch, 8), 8
    if model in WORDS:
        num_words, steps, _ = words_of(model, is_tiny)
        return (batch, steps), num_words
    size, num_classes = SIZES[model]
    return (batch, 3, 32 if is_tiny else size, 32 if is_tiny else size), num_classes


def words_of(model: str, is_tiny: bool) -> tuple[int, int, int]:
    """Words, steps and units of a language model."""
    return (50, 4, 16) if is_tiny else WORDS[model]


def dbrdist_case(
    model: str, batch: int, dtype: str, on: str, launch: bool = False, exact: bool = False, mode: str = ""
) -> device.Timed:
    """A step with dbrdist, written with links as a user writes it; captured as a CUDA graph with the mode 'graph'."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.training.captured_step import CapturedSteps

    clock = device.Host() if on == "numpy" else device.Cuda()
    dbrdist.config.dtype = "mixed16" if dtype == "float16" else np.dtype(dtype)
    dbrdist.config.use_cudnn_tensor_core = "auto" if exact else "always"
    place = device.of(on)
    net = _dbrdist_network(model, on == "numpy").to_device(place)
    optimizer = optimizers.MomentumSGD(0.001, 0.9).setup(net)
    shape, num_classes = inputs(model, batch, on == "numpy")
    rng = np.random.default_rng(0)
    if model in WORDS:
        x = place.send(rng.integers(0, num_classes, shape).astype(np.int32))
        t = place.send(rng.integers(0, num_classes, batch * shape[1]).astype(np.int32))
    else:
        x = place.send(rng.standard_normal(shape, np.float32).astype(dtype))
        t = place.send(rng.integers(0, num_classes, batch).astype(np.int32))

    def loss(x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(net(x), t)

    def step() -> None:
        optimizer.update(loss, x, t)

    captured = CapturedSteps()

    def replayed() -> None:
        captured.update(optimizer, loss, (x, t), {}, {})

    if mode == "graph":
        for _ in range(6):  # warm up, and capture
            replayed()
    return device.Timed(replayed if mode == "graph" else step, clock, launch)


def _dbrdist_network(model: str, is_tiny: bool) -> Any:
    import whole_models

    import dbrdist
    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist.models import resnet

    if model == "mlp":
        return dbrdist.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8))
    if model in SIZES:
        return (resnet.ResNet20 if model == "resnet20" else resnet.ResNet50)(SIZES[model][1])
    num_words, _, units = words_of(model, is_tiny)
    if model == "lstm":
        return whole_models.LanguageModel(num_words, units)
    return whole_models.Transformer(num_words, units, 2 if is_tiny else 8)


def torch_case(
    model: str, batch: int, dtype: str, on: str, launch: bool = False, exact: bool = False, mode: str = ""
) -> device.Timed:
    """The same step with PyTorch in channels-last memory, eager or compiled in a mode; float16 by autocast."""
    import torch

    clock = device.Host() if on == "numpy" else device.TorchCuda()
    torch.backends.cudnn.allow_tf32 = not exact
    shape, num_classes = inputs(model, batch, on == "numpy")
    place = "cpu" if on == "numpy" else "cuda"
    memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    net = _torch_network(model, on == "numpy").to(place, memory_format=memory)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    num = batch * shape[1] if model in WORDS else batch
    x = torch.randint(0, num_classes, shape, device=place) if model in WORDS else torch.randn(*shape, device=place)
    x = x.contiguous(memory_format=memory)
    t = torch.randint(0, num_classes, (num,), device=place)
    forward = torch.compile(net, mode=mode) if mode else net

    def step() -> None:
        with torch.autocast(place, torch.float16, enabled=dtype == "float16"):
            loss = torch.nn.functional.cross_entropy(forward(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return device.Timed(step, clock, launch)


def _torch_network(model: str, is_tiny: bool) -> Any:
    import torch
    import torch_resnet

    nn = torch.nn
    if model == "mlp":
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if model in SIZES:
        return (torch_resnet.resnet20 if model == "resnet20" else torch_resnet.resnet50)(SIZES[model][1])
    num_words, steps, units = words_of(model, is_tiny)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(num_words, units), nn.Linear(units, num_words)
            heads = 2 if is_tiny else 8
            self.inner = nn.LSTM(units, units, 2, batch_first=True) if model == "lstm" else nn.TransformerEncoderLayer(
                units, heads, 4 * units, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
            )  # fmt: skip
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(steps))

        def forward(self, x: Any) -> Any:
            h = self.embed(x)
            h = self.inner(h)[0] if model == "lstm" else self.inner(h, src_mask=self.mask, is_causal=True)
            return self.out(h.reshape(-1, units))

    return Words()


def main() -> None:
    args = arguments()
    if args.worker:
        side, on, mode = args.worker.split(":")
        device.require(on if side == "dbrdist" else "numpy")
        case: Callable[..., device.Timed] = dbrdist_case if side == "dbrdist" else torch_case
        harness.serve({"step": functools.partial(case, mode=mode)})
        return
    device.require(args.on)
    workers = started(args)
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: what was measured so far is recorded"))
    is_whole = False
    try:
        for model in args.models:
            for batch in args.batches or ([2] if args.on == "numpy" else BATCHES[model]):
                for launch in (False, True) if model == "mlp" or batch == 16 else (False,):
                    name = f"{model}, batch {batch}" + (", host" if launch else "")
                    results[name] = measure(workers, args, model, batch, launch)
                    show(name, results[name], batch)
        is_whole = True
    finally:
        if args.record and results:
            print(recorded(args, workers, results, is_whole), flush=True)
    for w in workers.values():
        w.close()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = device.arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=["mlp", "resnet20", "resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, help="for all models; default: those of each model")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--exact", action="store_true", help="float32 convolutions without TF32, on both sides")
    parser.add_argument("--graph", action="store_true", help="measure captured steps of dbrdist, too")
    parser.add_argument("--torch", action="store_true", help="measure PyTorch too, in this environment")
    parser.add_argument("--torch-python", help="or in the environment of this interpreter")
    parser.add_argument("--compile", nargs="+", default=[], help="modes of torch.compile to measure, such as default")
    parser.add_argument("--name", help="of the record, behind gpu-steps; default: the type")
    parser.add_argument("--worker", help="used by the script itself: dbrdist or torch, what it runs on, and the mode")
    return parser.parse_args()


def started(args: argparse.Namespace) -> dict[str, harness.Worker]:
    """A process for each side."""
    sides = {"dbrdist": (sys.executable, "dbrdist", "")}
    if args.graph:
        sides["dbrdist graph"] = (sys.executable, "dbrdist", "graph")
    if args.torch or args.torch_python:
        python = args.torch_python or sys.executable
        sides["torch"] = (python, "torch", "")
        sides |= {f"torch {mode}": (python, "torch", mode) for mode in args.compile}
    return {
        label: harness.Worker(python, __file__, f"{side}:{args.on}:{mode}")
        for label, (python, side, mode) in sides.items()
    }


def recorded(args: argparse.Namespace, workers: dict[str, Any], results: dict[str, Any], is_whole: bool) -> Any:
    """The file of the record."""
    settings = {
        "models": args.models, "dtype": args.dtype, "exact": args.exact, "num_rounds": args.rounds,
        "min_seconds": args.seconds, "is_whole": is_whole,
    }  # fmt: skip
    about = {label: w.ask("about") for label, w in workers.items()} if is_whole else {}
    return harness.record(f"gpu-steps-{args.name or args.dtype}", settings, results, {**about, **device.about(args.on)})


def measure(workers: dict[str, Any], args: Any, model: str, batch: int, launch: bool) -> dict[str, Any]:
    """Times of one case on each side."""
    return harness.compare(
        workers, "step", num_rounds=args.rounds, min_seconds=args.seconds, calls=20 if model == "mlp" else 3,
        arguments={"model": model, "batch": batch, "dtype": args.dtype, "on": args.on, "launch": launch,
                   "exact": args.exact},
    )  # fmt: skip


def show(name: str, result: dict[str, Any], batch: int) -> None:
    """One line for each side."""
    for label, r in result.items():
        seconds = r["median_seconds"]
        peak = f", {r['device_peak_bytes'] / 1e9:.2f} GB" if r.get("device_peak_bytes") else ""
        print(f"{name:<26} {label:<14} {seconds * 1e3:10.3f} ms  ({r['min_seconds'] * 1e3:.3f} to "
              f"{r['max_seconds'] * 1e3:.3f}), {batch / seconds:10.0f} examples/s{peak}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
