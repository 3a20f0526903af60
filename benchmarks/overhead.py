"""Host overhead: the full step of an MLP too small for arithmetic to matter, against PyTorch eager.

Forward, backward and momentum update; three layers of 8 units, batch 8, float32, one thread. Goals: a ratio of 0.15
compiled and 0.30 interpreted. With the interpreter of an environment into which dbrdist was installed
(``make test-wheel`` leaves one) it is measured as users have it, compiled, and beside it the sources of the checkout,
interpreted.

    .venv-wheel/bin/python benchmarks/overhead.py --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness

NUM_LAYERS = 3


def dbrdist_step(units: int, batch: int) -> Callable[[], Any]:
    """One training step with dbrdist, written with links as a user writes it."""
    import numpy as np

    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import Sequential, optimizers

    layers: list[Any] = []
    for i in range(NUM_LAYERS):
        layers += [L.Linear(units, units)] + ([F.relu] if i < NUM_LAYERS - 1 else [])
    model = Sequential(*layers)
    optimizer = optimizers.MomentumSGD(0.01, 0.9).setup(model)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, units), np.float32)
    t = rng.integers(0, units, batch)

    def step() -> None:
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def torch_step(units: int, batch: int) -> Callable[[], Any]:
    """The same step with PyTorch eager."""
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for i in range(NUM_LAYERS):
        layers += [torch.nn.Linear(units, units)] + ([torch.nn.ReLU()] if i < NUM_LAYERS - 1 else [])
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(batch, units)
    t = torch.randint(0, units, (batch,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"step": dbrdist_step if args.worker == "dbrdist" else torch_step})
        return
    is_installed = harness.is_installed()
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", installed=is_installed)}
    if is_installed:
        workers["interpreted"] = harness.Worker(sys.executable, __file__, "dbrdist")
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch")
    settings = {"units": args.units, "batch": args.batch, "num_layers": NUM_LAYERS, "num_rounds": args.rounds}
    arguments = {"units": args.units, "batch": args.batch}
    results: dict[str, Any] = harness.compare(workers, "step", num_rounds=args.rounds, calls=100, arguments=arguments)
    for label, r in results.items():
        print(f"{label:<12} {r['median_seconds'] * 1e6:8.1f} us  ({r['min_seconds'] * 1e6:.1f} to "
              f"{r['max_seconds'] * 1e6:.1f})")  # fmt: skip
    if "torch" in results:
        results["ratio"] = results["dbrdist"]["median_seconds"] / results["torch"]["median_seconds"]
        print(f"ratio        {results['ratio']:8.3f}")
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        print(harness.record("overhead", settings, results, about))


if __name__ == "__main__":
    main()
