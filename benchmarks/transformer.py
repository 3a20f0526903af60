"""A Transformer block against PyTorch's ``nn.TransformerEncoderLayer``: the full training step, one thread.

256 wide, 4 heads, 1,024 hidden, 128 tokens, batch 16; mean squared error and an SGD update. PyTorch runs as it is and
through ``torch.compile``; the faster counts. Goals: at most 0.85 of its time; 768 wide 0.9, with 512 tokens 0.85.

    python benchmarks/transformer.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/transformer.py --torch-python TORCH_VENV/bin/python --units 768 --heads 12 --batch 8 --record
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import harness


def dbrdist_step(units: int, heads: int, tokens: int, batch: int, dropout: float) -> Callable[[], Any]:
    """One training step with dbrdist."""
    import numpy as np

    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import optimizers

    model = L.TransformerBlock(units, heads, dropout=dropout)
    optimizer = optimizers.SGD(0.1).setup(model)
    rng = np.random.default_rng(0)
    x, t = (rng.standard_normal((batch, tokens, units), np.float32) for _ in range(2))

    def step() -> None:
        loss = F.mean_squared_error(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def torch_step(
    units: int, heads: int, tokens: int, batch: int, dropout: float, compiled: bool = False
) -> Callable[[], Any]:
    """The same step with PyTorch."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.TransformerEncoderLayer(units, heads, 4 * units, dropout, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, t = (torch.randn(batch, tokens, units) for _ in range(2))
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        loss = torch.nn.functional.mse_loss(forward(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch", "compiled"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        compiled = functools.partial(torch_step, compiled=True)
        harness.serve({"step": {"dbrdist": dbrdist_step, "torch": torch_step, "compiled": compiled}[args.worker]})
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", installed=harness.is_installed())}
    if args.torch_python:
        workers["torch eager"] = harness.Worker(args.torch_python, __file__, "torch")
        workers["torch compiled"] = harness.Worker(args.torch_python, __file__, "compiled")
    arguments = {name: getattr(args, name) for name in ("units", "heads", "tokens", "batch", "dropout")}
    results: dict[str, Any] = harness.compare(workers, "step", num_rounds=args.rounds, arguments=arguments)
    for label, r in results.items():
        print(f"{label:<14} {r['median_seconds'] * 1e3:8.1f} ms  ({r['min_seconds'] * 1e3:.1f} to "
              f"{r['max_seconds'] * 1e3:.1f})")  # fmt: skip
    if len(results) > 1:
        peers = [results[label] for label in ("torch eager", "torch compiled")]
        results["torch"] = min(peers, key=lambda r: r["median_seconds"])
        results["ratio"] = results["dbrdist"]["median_seconds"] / results["torch"]["median_seconds"]
        print(f"ratio          {results['ratio']:8.3f}")
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        which = "transformer" if (args.units, args.tokens) == (256, 128) else f"transformer-{args.units}x{args.tokens}"
        print(harness.record(which, {**arguments, "num_rounds": args.rounds}, results, about))


if __name__ == "__main__":
    main()
