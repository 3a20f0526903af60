"""The error of the gradient of ResNet-50 in float32 against float64: goal at most 1.3 times that of PyTorch.

One training step on random images with the same weights, computed by dbrdist and by PyTorch in float32 (channels-last)
and by PyTorch in float64, which is the reference. The error is the norm of the difference over the norm of the
reference, of all gradients together; the largest of a single parameter is printed too. Several draws, since an input of
a ReLU near zero may fall on either side. The interpreter has dbrdist, PyTorch and oneDNN:

    PYTHONPATH=.:launch TORCH_VENV/bin/python benchmarks/gradient_error.py --record
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import harness
import numpy as np
import torch
import torch_resnet

import dbrdist
import dbrdist.functions as F
from dbrdist.models.resnet import ResNet50

GOAL = 1.3


def ours(weights: list[Any], x: Any, t: Any, num_classes: int) -> list[Any]:
    """Gradients in the order of registration."""
    model = ResNet50(num_classes)
    for link in model.links():
        if hasattr(link, "eps"):
            link.eps = 1e-5
    for p, value in zip(model.params(), weights, strict=True):
        p.array = value.astype(np.float32)
    F.softmax_cross_entropy(model(x.astype(np.float32)), t).backward()
    return [p.grad for p in model.params()]


def order(model: Any) -> list[Any]:
    """PyTorch's parameters in the order of ours: shortcuts come last in both."""
    return list(model.parameters())


def theirs(weights: list[Any], x: Any, t: Any, num_classes: int, dtype: Any) -> list[Any]:
    """Gradients of PyTorch."""
    model = torch_resnet.resnet50(num_classes).to(dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for p, value in zip(order(model), weights, strict=True):
            p.copy_(torch.from_numpy(value).to(dtype).reshape(p.shape))
    images = torch.from_numpy(x).to(dtype).contiguous(memory_format=torch.channels_last)
    torch.nn.functional.cross_entropy(model(images), torch.from_numpy(t)).backward()
    return [p.grad.numpy() for p in order(model)]


def error(found: list[Any], expected: list[Any]) -> tuple[float, float]:
    """Over all gradients together, and the largest of one parameter."""
    squares = [(float(((a - b) ** 2).sum()), float((b**2).sum())) for a, b in zip(found, expected)]
    total = (sum(d for d, _ in squares) / sum(s for _, s in squares)) ** 0.5
    return total, max((d / s) ** 0.5 for d, s in squares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, default=224)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results: dict[str, Any] = {"dbrdist": [], "torch": []}
    for draw in range(args.draws):
        rng = np.random.default_rng(draw)
        dbrdist.random.set_seed(draw)
        weights = [p.array.astype(np.float32).astype(np.float64) for p in ResNet50(1000).params()]
        x = rng.standard_normal((args.batch, 3, args.rows, args.rows)).astype(np.float32).astype(np.float64)
        t = rng.integers(0, 1000, args.batch)
        expected = theirs(weights, x, t, 1000, torch.float64)
        found = {"dbrdist": ours(weights, x, t, 1000), "torch": theirs(weights, x, t, 1000, torch.float32)}
        for name, gradients in found.items():
            results[name].append(error([g.astype(np.float64) for g in gradients], expected))
            print(
                f"draw {draw}: {name:<8} {results[name][-1][0]:.3e}, worst parameter {results[name][-1][1]:.3e}",
                flush=True,
            )
    ratios = [a[0] / b[0] for a, b in zip(results["dbrdist"], results["torch"])]
    results["ratio"] = statistics.median(ratios)
    print(f"ratio {results['ratio']:.3f} (median of {len(ratios)}; goal: at most {GOAL})")
    if args.record:
        settings = {"batch": args.batch, "rows": args.rows, "goal": GOAL}
        about = {"torch": torch.__version__, "numpy": np.__version__, "dbrdist": dbrdist.__version__}
        print(harness.record("gradient-error", settings, results, about))


if __name__ == "__main__":
    main()
