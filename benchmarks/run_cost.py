"""What dbrdist-train adds to a step of a hand-written loop with the same network, on one rank with one thread.

A run is started as users start it. An extension in it lets some steps of the run pass, then does as many by hand (a
shuffled order, batches by indexing, loss, backward, update), in turns in one process. Goals: under 30 us for an MLP
of 3 layers of 8 units at batch 8, under 3 % of a step of ResNet-20 at batch 128.

    python benchmarks/run_cost.py --record
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

# model, its settings, shape of an example, batch, steps in a turn, turns
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"name": "mlp", "units": [8, 8]}, "shape": [8], "batch": 8, "steps": 200, "turns": 41},
    "resnet20": {"model": {"name": "resnet20"}, "shape": [3, 32, 32], "batch": 128, "steps": 1, "turns": 9},
}
NUM_BATCHES = 32  # of an epoch


def turns(case: str, results: str) -> Any:
    """The extension: it measures the steps of the run between its calls, and those of its own loop."""
    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.training import Extension

    settings = CASES[case]
    x, t = examples(settings)

    class Turns(Extension):
        trigger = (1, "iteration")
        priority = -(10**6)  # after everything else of a step

        def __init__(self) -> None:
            self.count = -settings["steps"]  # the first ones warm up
            self.began = 0.0
            self.samples: dict[str, list[float]] = {"run": [], "by_hand": []}

        def initialize(self, trainer: Any) -> None:
            self.net = copy.deepcopy(trainer.updater.get_optimizer("main").target.predictor)
            self.optimizer = optimizers.MomentumSGD(1e-3, 0.9).setup(self.net)
            self.batches = self.order()
            self.by_hand()

        def order(self) -> Any:
            import numpy as np

            rng, size = np.random.default_rng(0), settings["batch"]
            while True:
                indices = rng.permutation(len(x))
                for start in range(0, len(x), size):
                    batch = indices[start : start + size]
                    yield x[batch], t[batch]

        def by_hand(self) -> None:
            for _, (inputs, labels) in zip(range(settings["steps"]), self.batches):
                loss = F.softmax_cross_entropy(self.net(inputs), labels)
                self.net.cleargrads()
                loss.backward()
                self.optimizer.update()

        def __call__(self, trainer: Any) -> None:
            self.count += 1
            if self.count == settings["steps"]:
                now = time.perf_counter()
                self.samples["run"].append((now - self.began) / settings["steps"])
                self.by_hand()
                self.samples["by_hand"].append((time.perf_counter() - now) / settings["steps"])
                self.count = 0
            if self.count == 0:
                self.began = time.perf_counter()

        def finalize(self) -> None:
            Path(results).write_text(json.dumps(self.samples))

    return Turns()


def examples(settings: dict[str, Any]) -> Any:
    """Random inputs and labels, 32 batches of them."""
    import numpy as np

    rng, n = np.random.default_rng(0), NUM_BATCHES * settings["batch"]
    return rng.standard_normal((n, *settings["shape"]), np.float32), rng.integers(0, 10, n).astype(np.int32)


def measure(case: str) -> dict[str, Any]:
    """Both times of a step, and what the run adds."""
    import numpy as np

    settings = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        x, t = examples(settings)
        np.savez(Path(folder, "data.npz"), x=x, y=t)
        extension = {"name": "run_cost:turns", "args": {"case": case, "results": "results.json"}}
        config = {
            "model": {**settings["model"], "num_classes": 10},
            "data": {"name": "npz", "train": "data.npz"},
            "batch": settings["batch"],
            "epochs": 1e6,
            "iterations": settings["steps"] * (settings["turns"] + 1),
            "optimizer": {"name": "momentum_sgd", "lr": 1e-3},
            "snapshot": {"every": "1000000 iterations"},
            "log": {"every": "1000 iterations"},
            "extensions": [extension],
        }
        Path(folder, "run.yaml").write_text(json.dumps(config))
        paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "launch"), str(harness.ROOT / "benchmarks")])
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "dbrdist.cli.train", "run.yaml"]
        environment = {**os.environ, **threads, "PYTHONPATH": paths}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        samples = json.loads(Path(folder, "results.json").read_text())
    added = [a - b for a, b in zip(samples["run"], samples["by_hand"])]
    return {name: harness.summarize(values) for name, values in {**samples, "added": added}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results = {}
    for case in args.case or CASES:
        results[case] = measure(case)
        run, by_hand, added = (results[case][key]["median_seconds"] for key in ("run", "by_hand", "added"))
        results[case]["added_fraction"] = added / by_hand
        print(f"{case:<10} {run * 1e6:10.1f} us, by hand {by_hand * 1e6:10.1f} us: "
              f"{added * 1e6:.1f} us more, {added / by_hand:.1%}")  # fmt: skip
    if args.record:
        print(harness.record("run-cost", CASES, results))


if __name__ == "__main__":
    main()
