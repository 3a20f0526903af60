"""A language model of two LSTM layers against PyTorch's ``nn.LSTM``: the full training step, one thread.

Embedding, two layers, a linear layer over the vocabulary, softmax cross entropy and an SGD update (Zaremba et al. 2014,
medium size: 650 units, batch 20, 35 steps). Goal: at most PyTorch's time.

    python benchmarks/lstm.py --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import harness


def dbrdist_step(units: int, batch: int, steps: int, words: int) -> Callable[[], Any]:
    """One training step with dbrdist."""
    import numpy as np

    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import Chain, optimizers

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.embed = L.EmbedID(words, units)
                self.lstm = L.NStepLSTM(2, units, units, 0.0)
                self.out = L.Linear(units, words)

        def forward(self, xs: Any) -> Any:
            _, _, ys = self.lstm(None, None, list(F.separate(self.embed(xs), axis=0)))
            return self.out(F.concat(ys, axis=0))

    model = Model()
    optimizer = optimizers.SGD(0.1).setup(model)
    rng = np.random.default_rng(0)
    xs = rng.integers(0, words, (batch, steps))
    ts = rng.integers(0, words, batch * steps)

    def step() -> None:
        loss = F.softmax_cross_entropy(model(xs), ts)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def torch_step(units: int, batch: int, steps: int, words: int) -> Callable[[], Any]:
    """The same step with PyTorch."""
    import torch

    torch.set_num_threads(1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(words, units)
            self.lstm = torch.nn.LSTM(units, units, 2)
            self.out = torch.nn.Linear(units, words)

        def forward(self, x: Any) -> Any:
            y, _ = self.lstm(self.embed(x))
            return self.out(y.reshape(-1, units))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randint(0, words, (steps, batch))
    t = torch.randint(0, words, (steps * batch,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--units", type=int, default=650)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--words", type=int, default=10_000)
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
    arguments = {"units": args.units, "batch": args.batch, "steps": args.steps, "words": args.words}
    results: dict[str, Any] = harness.compare(workers, "step", num_rounds=args.rounds, arguments=arguments)
    for label, r in results.items():
        print(f"{label:<12} {r['median_seconds'] * 1e3:8.1f} ms  ({r['min_seconds'] * 1e3:.1f} to "
              f"{r['max_seconds'] * 1e3:.1f})")  # fmt: skip
    if "torch" in results:
        results["ratio"] = results["dbrdist"]["median_seconds"] / results["torch"]["median_seconds"]
        print(f"ratio        {results['ratio']:8.3f}")
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        print(harness.record("lstm", {**arguments, "num_rounds": args.rounds}, results, about))


if __name__ == "__main__":
    main()
