"""Elementwise functions, activations and losses against PyTorch eager: forward and backward of 2^20 float32.

One thread; each function alternates with the peer. Goal: each at most 1.2 of PyTorch's time, the median at most 0.85.

    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/elementwise.py --torch-python TORCH_VENV/bin/python --only leaky_relu huber_loss
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness

ROWS, COLUMNS = 1024, 1024
# name: number of floating operands, what they hold, dbrdist's call, PyTorch's call (t: integer labels)
CASES: dict[str, tuple[int, str, str, str]] = {
    "add": (2, "any", "a + b", "a + b"),
    "sub": (2, "any", "a - b", "a - b"),
    "mul": (2, "any", "a * b", "a * b"),
    "div": (2, "positive", "a / b", "a / b"),
    "pow": (2, "positive", "a ** b", "a ** b"),
    "pow_number": (1, "positive", "a ** 3", "a ** 3"),
    "neg": (1, "any", "-a", "-a"),
    "absolute": (1, "any", "F.absolute(a)", "torch.abs(a)"),
    "maximum": (2, "any", "F.maximum(a, b)", "torch.maximum(a, b)"),
    "minimum": (2, "any", "F.minimum(a, b)", "torch.minimum(a, b)"),
    "clip": (1, "any", "F.clip(a, -0.5, 0.5)", "torch.clamp(a, -0.5, 0.5)"),
    "squared_difference": (2, "any", "F.squared_difference(a, b)", "(a - b) ** 2"),
    "exp": (1, "any", "F.exp(a)", "torch.exp(a)"),
    "expm1": (1, "any", "F.expm1(a)", "torch.expm1(a)"),
    "log": (1, "positive", "F.log(a)", "torch.log(a)"),
    "log1p": (1, "positive", "F.log1p(a)", "torch.log1p(a)"),
    "log2": (1, "positive", "F.log2(a)", "torch.log2(a)"),
    "log10": (1, "positive", "F.log10(a)", "torch.log10(a)"),
    "sqrt": (1, "positive", "F.sqrt(a)", "torch.sqrt(a)"),
    "rsqrt": (1, "positive", "F.rsqrt(a)", "torch.rsqrt(a)"),
    "square": (1, "any", "F.square(a)", "torch.square(a)"),
    "sin": (1, "any", "F.sin(a)", "torch.sin(a)"),
    "cos": (1, "any", "F.cos(a)", "torch.cos(a)"),
    "tan": (1, "inner", "F.tan(a)", "torch.tan(a)"),
    "arcsin": (1, "inner", "F.arcsin(a)", "torch.asin(a)"),
    "arccos": (1, "inner", "F.arccos(a)", "torch.acos(a)"),
    "arctan": (1, "any", "F.arctan(a)", "torch.atan(a)"),
    "arctan2": (2, "any", "F.arctan2(a, b)", "torch.atan2(a, b)"),
    "arctanh": (1, "inner", "F.arctanh(a)", "torch.atanh(a)"),
    "sinh": (1, "any", "F.sinh(a)", "torch.sinh(a)"),
    "cosh": (1, "any", "F.cosh(a)", "torch.cosh(a)"),
    "tanh": (1, "any", "F.tanh(a)", "torch.tanh(a)"),
    "sigmoid": (1, "any", "F.sigmoid(a)", "torch.sigmoid(a)"),
    "relu": (1, "any", "F.relu(a)", "f.relu(a)"),
    "leaky_relu": (1, "any", "F.leaky_relu(a)", "f.leaky_relu(a, 0.2)"),
    "elu": (1, "any", "F.elu(a)", "f.elu(a)"),
    "selu": (1, "any", "F.selu(a)", "f.selu(a)"),
    "softplus": (1, "any", "F.softplus(a)", "f.softplus(a)"),
    "clipped_relu": (1, "any", "F.clipped_relu(a, 0.5)", "f.hardtanh(a, 0.0, 0.5)"),
    "relu6": (1, "any", "F.relu6(a)", "f.relu6(a)"),
    "hard_sigmoid": (1, "any", "F.hard_sigmoid(a)", "torch.clamp(a * 0.2 + 0.5, 0.0, 1.0)"),
    "swish": (1, "any", "F.swish(a, ones)", "f.silu(a)"),
    "silu": (1, "any", "F.silu(a)", "f.silu(a)"),
    "mish": (1, "any", "F.mish(a)", "f.mish(a)"),
    "hardswish": (1, "any", "F.hardswish(a)", "f.hardswish(a)"),
    "gelu": (1, "any", "F.gelu(a)", "f.gelu(a)"),
    "gelu_tanh": (1, "any", "F.gelu(a, 'tanh')", "f.gelu(a, approximate='tanh')"),
    "crelu": (1, "any", "F.crelu(a)", "torch.cat((f.relu(a), f.relu(-a)), 1)"),
    "softmax": (1, "any", "F.softmax(a)", "f.softmax(a, 1)"),
    "log_softmax": (1, "any", "F.log_softmax(a)", "f.log_softmax(a, 1)"),
    "logsumexp": (1, "any", "F.logsumexp(a, 1)", "torch.logsumexp(a, 1)"),
    "softmax_cross_entropy": (1, "any", "F.softmax_cross_entropy(a, t)", "f.cross_entropy(a, t)"),
    "sigmoid_cross_entropy": (
        1, "any", "F.sigmoid_cross_entropy(a, u)", "f.binary_cross_entropy_with_logits(a, u.float())",
    ),
    "mean_squared_error": (2, "any", "F.mean_squared_error(a, b)", "f.mse_loss(a, b)"),
    "mean_absolute_error": (2, "any", "F.mean_absolute_error(a, b)", "f.l1_loss(a, b)"),
    "squared_error": (2, "any", "F.squared_error(a, b)", "f.mse_loss(a, b, reduction='none')"),
    "absolute_error": (2, "any", "F.absolute_error(a, b)", "f.l1_loss(a, b, reduction='none')"),
    "huber_loss": (2, "any", "F.huber_loss(a, b, 0.6, 'no')", "f.huber_loss(a, b, reduction='none', delta=0.6)"),
    "hinge": (1, "any", "F.hinge(a, t)", "(1 + a * sign).clamp(min=0).sum() / 1024"),
    "bernoulli_nll": (
        2, "positive", "F.bernoulli_nll(a, b)", "f.binary_cross_entropy_with_logits(b, a, reduction='sum')",
    ),
    "gaussian_kl_divergence": (
        2, "any", "F.gaussian_kl_divergence(a, b)", "((a * a + b.exp() - b - 1) * 0.5).sum()",
    ),
    "gaussian_nll": (
        3, "any", "F.gaussian_nll(a, b, c)",
        "(((a - b) ** 2 * (-c).exp() + c + 1.8378770664093453) * 0.5).sum()",
    ),
    "pow_half": (1, "positive", "a ** 0.5", "a ** 0.5"),
    "pow_minus_one": (1, "positive", "a ** -1", "a ** -1"),
    "pow_minus_half": (1, "positive", "a ** -0.5", "a ** -0.5"),
    "pow_2.5": (1, "positive", "a ** 2.5", "a ** 2.5"),
    "fmod": (2, "positive", "F.fmod(a, b)", "torch.fmod(a, b)"),
    "remainder": (2, "positive", "a % b", "a % b"),
    "erf": (1, "any", "F.erf(a)", "torch.erf(a)"),
    "erfc": (1, "any", "F.erfc(a)", "torch.erfc(a)"),
    "erfinv": (1, "inner", "F.erfinv(a)", "torch.erfinv(a)"),
    "ndtr": (1, "any", "F.ndtr(a)", "torch.special.ndtr(a)"),
    "ndtri": (1, "unit", "F.ndtri(a)", "torch.special.ndtri(a)"),
    "log_ndtr": (1, "any", "F.log_ndtr(a)", "torch.special.log_ndtr(a)"),
    "lgamma": (1, "positive", "F.lgamma(a)", "torch.lgamma(a)"),
    "digamma": (1, "positive", "F.digamma(a)", "torch.digamma(a)"),
    "where": (2, "any", "F.where(u > 0, a, b)", "torch.where(u > 0, a, b)"),
    "maxout": (1, "any", "F.maxout(a, 4)", "a.reshape(1024, 256, 4).amax(2)"),
    "swish_rows": (2, "any", "F.swish(a, b[0])", "a * torch.sigmoid(a * b[0])"),
    "prelu": (2, "any", "F.prelu(a, b[0])", "f.prelu(a, b[0])"),
    "rrelu": (1, "any", "F.rrelu(a)", "f.rrelu(a, training=True)"),
    "normalize": (1, "any", "F.normalize(a)", "f.normalize(a, dim=1, eps=1e-5)"),
    "gaussian": (2, "any", "F.gaussian(a, b)", "a + torch.exp(b * 0.5) * torch.randn_like(a)"),
    "cumsum": (1, "any", "F.cumsum(a, 1)", "torch.cumsum(a, 1)"),
    "dropout": (1, "any", "F.dropout(a)", "f.dropout(a)"),
    "sum": (1, "any", "F.sum(a)", "a.sum()"),
    "mean": (1, "any", "F.mean(a)", "a.mean()"),
    "max": (1, "any", "F.max(a, 1)", "a.amax(1)"),
}  # fmt: skip


def operands(count: int, kind: str) -> list[Any]:
    """Arrays of the numbers that a case takes: the same on both sides."""
    import numpy as np

    rng = np.random.default_rng(0)
    bounds = {"any": (-2.0, 2.0), "positive": (0.3, 2.0), "inner": (-0.9, 0.9), "unit": (0.05, 0.95)}[kind]
    return [rng.uniform(*bounds, (ROWS, COLUMNS)).astype(np.float32) for _ in range(count)]


def labels() -> tuple[Any, Any]:
    """Class labels for rows, and a label 0 or 1 for each element."""
    import numpy as np

    rng = np.random.default_rng(1)
    return rng.integers(0, COLUMNS, ROWS), rng.integers(0, 2, (ROWS, COLUMNS)).astype(np.int32)


def dbrdist_case(name: str) -> Callable[[], Any]:
    """Forward and backward with dbrdist."""
    import numpy as np

    import dbrdist
    import dbrdist.functions as F

    count, kind, expression, _ = CASES[name]
    variables = [dbrdist.Variable(a) for a in operands(count, kind)]
    t, u = labels()
    scope = {"F": F, "t": t, "u": u, "ones": np.ones((), np.float32), **dict(zip("abc", variables))}
    code = compile(expression, name, "eval")
    gy = np.ones(eval(code, scope).shape, np.float32)

    def step() -> None:
        for x in variables:
            x.cleargrad()
        dbrdist.backward([eval(code, scope)], [gy])

    return step


def torch_case(name: str) -> Callable[[], Any]:
    """The same with PyTorch."""
    import torch

    torch.set_num_threads(1)
    count, kind, _, expression = CASES[name]
    tensors = [torch.from_numpy(a).requires_grad_() for a in operands(count, kind)]
    t, u = (torch.from_numpy(a) for a in labels())
    sign = torch.ones(ROWS, COLUMNS).scatter_(1, t[:, None], -1.0)
    scope = {"torch": torch, "f": torch.nn.functional, "t": t, "u": u, "sign": sign, **dict(zip("abc", tensors))}
    code = compile(expression, name, "eval")
    gy = torch.ones_like(eval(code, scope))

    def step() -> None:
        for x in tensors:
            x.grad = None
        eval(code, scope).backward(gy)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", required=False, help="interpreter of an environment that has PyTorch")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these functions alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.08, help="of each sample")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"function": dbrdist_case if args.worker == "dbrdist" else torch_case})
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist")}
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch")
    results: dict[str, Any] = {}
    ratios = {}
    for name in args.only:
        measured = harness.compare(
            workers, "function", num_rounds=args.rounds, min_seconds=args.seconds, arguments={"name": name}
        )
        results[name] = measured
        words = [f"{label} {r['median_seconds'] * 1e3:7.2f} ms" for label, r in measured.items()]
        if "torch" in measured:
            pairs = zip(measured["dbrdist"]["samples"], measured["torch"]["samples"])
            ratios[name] = results[name]["ratio"] = statistics.median(a / b for a, b in pairs)
            words.append(f"ratio {ratios[name]:5.2f}")
        print(f"{name:<24}", "  ".join(words), flush=True)
    if ratios:
        results["median_ratio"] = statistics.median(ratios.values())
        results["above_goal"] = {n: r for n, r in ratios.items() if r > 1.2}
        print(f"median ratio {results['median_ratio']:.2f}; above 1.2: {', '.join(results['above_goal']) or 'none'}")
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        settings = {"rows": ROWS, "columns": COLUMNS, "num_rounds": args.rounds, "min_seconds": args.seconds}
        print(harness.record("elementwise", settings, results, about))


if __name__ == "__main__":
    main()
