"""One update of 10 million float32 parameters, against PyTorch's fused optimizers; one thread.

Goal: at most PyTorch's time. Compiled loops serve where dbrdist is installed; in a checkout NumPy's formulas do.

    TORCHLESS_VENV/bin/python benchmarks/updates.py --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness

NUM_PARAMETERS = 10_000_000
# name: dbrdist's optimizer, PyTorch's
CASES = {
    "SGD": ("optimizers.SGD(0.1)", "torch.optim.SGD(p, lr=0.1, fused=True)"),
    "MomentumSGD": ("optimizers.MomentumSGD(0.1, 0.9)", "torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)"),
    "Adam": ("optimizers.Adam(0.001)", "torch.optim.Adam(p, lr=0.001, fused=True)"),
    "AdamW": (
        "optimizers.AdamW(0.001, weight_decay_rate=0.01)",
        "torch.optim.AdamW(p, lr=0.001, weight_decay=0.01, fused=True)",
    ),
    "AMSGrad": ("optimizers.AMSGrad(0.001)", "torch.optim.Adam(p, lr=0.001, amsgrad=True, fused=True)"),
    "AdaGrad": ("optimizers.AdaGrad(0.001)", "torch.optim.Adagrad(p, lr=0.001, fused=True)"),
}


def dbrdist_update(name: str) -> Callable[[], Any]:
    """An update with dbrdist."""
    import numpy as np

    import dbrdist
    from dbrdist import optimizers

    rng, link = np.random.default_rng(0), dbrdist.Link()
    with link.init_scope():
        link.W = dbrdist.Parameter(rng.standard_normal(NUM_PARAMETERS, np.float32))
    optimizer = eval(CASES[name][0], {"optimizers": optimizers}).setup(link)
    link.W.grad = rng.standard_normal(NUM_PARAMETERS, np.float32)
    return lambda: optimizer.update()


def torch_update(name: str) -> Callable[[], Any]:
    """The same with PyTorch."""
    import torch

    torch.set_num_threads(1)
    p = torch.randn(NUM_PARAMETERS, requires_grad=True)
    p.grad = torch.randn(NUM_PARAMETERS)
    optimizer = eval(CASES[name][1], {"torch": torch, "p": [p]})
    return lambda: optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, for a machine with other work")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=["dbrdist", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        harness.serve({"update": dbrdist_update if args.worker == "dbrdist" else torch_update})
        return
    workers = {"dbrdist": harness.Worker(sys.executable, __file__, "dbrdist", installed=harness.is_installed())}
    if args.torch_python:
        workers["torch"] = harness.Worker(args.torch_python, __file__, "torch")
    results: dict[str, Any] = {}
    for name in CASES:
        found: dict[str, Any] = harness.compare(
            workers, "update", num_rounds=args.rounds, min_seconds=0.1, arguments={"name": name},
            is_cpu_time=args.cpu_time,
        )  # fmt: skip
        words = [f"{label} {r['median_seconds'] * 1e3:6.2f} ms" for label, r in found.items()]
        if "torch" in found:
            pairs = zip(found["dbrdist"]["samples"], found["torch"]["samples"])
            found["ratio"] = statistics.median(a / b for a, b in pairs)
            words.append(f"ratio {found['ratio']:5.2f}")
        results[name] = found
        print(f"{name:<12}", "  ".join(words), flush=True)
    about = {label: w.ask("about")["versions"] for label, w in workers.items()}
    for w in workers.values():
        w.close()
    if args.record:
        settings = {"num_parameters": NUM_PARAMETERS, "num_rounds": args.rounds}
        settings["clock"] = "process_time" if args.cpu_time else "perf_counter"
        print(harness.record("updates", settings, results, about))


if __name__ == "__main__":
    main()
