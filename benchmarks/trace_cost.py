"""What the trace and the audit of parameters cost in a step of ResNet-20, on one rank or several.

Steps with and without a recorder take turns; their difference is small beside the noise of a busy machine, so the
spans and meetings of a step are counted too, and each is timed by itself. The audit is timed as it stands, and divided
by the steps between two of them. Goals: the trace at most 2 % of a step, an audit every 100 steps at most 1 %.

    mpiexec -n 2 python benchmarks/trace_cost.py --record
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import harness
import numpy as np

from dbrdist import links as L
from dbrdist import models, optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.run import parameter_audit
from dbrdist.core.array import spans
from dbrdist.datasets import TupleDataset
from dbrdist.iterators import SerialIterator
from dbrdist.training import StandardUpdater

AUDIT_STEPS = 100  # between two audits
NUM_SPANS = 20_000  # in the loop that times one


def updater_for(comm: Any, batch: int) -> StandardUpdater:
    """Steps of ResNet-20 on random images, ``batch`` on each rank."""
    rng = np.random.default_rng(comm.rank)
    images = rng.standard_normal((4 * batch, 3, 32, 32), np.float32)
    labels = rng.integers(0, 10, len(images)).astype(np.int32)
    target = L.Classifier(models.ResNet20(10))
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(1e-3).setup(target), comm)
    return StandardUpdater(SerialIterator(TupleDataset(images, labels), batch), optimizer)


def steps(updater: StandardUpdater, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of steps with and without a recorder, in turns; spans and meetings of a step."""
    recorder = spans.Recorder()
    samples: dict[str, list[float]] = {"plain": [], "traced": []}
    for _ in range(2):
        updater.update()
    for turn in range(2 * rounds):
        name = ("plain", "traced")[(turn + turn // 2) % 2]  # each as often first as second
        spans.record(recorder if name == "traced" else None)
        began = time.perf_counter()
        updater.update()
        samples[name].append(time.perf_counter() - began)
    spans.record(None)
    return samples, (len(recorder.spans) + len(recorder.meetings)) / rounds


def seconds_of_a_span() -> float:
    """What a recorded span takes more than one that nobody records."""

    def loop() -> float:
        began = time.perf_counter()
        for _ in range(NUM_SPANS):
            with spans.span("reduce"):
                pass
        return (time.perf_counter() - began) / NUM_SPANS

    found = []
    for _ in range(5):
        idle = loop()
        spans.record(spans.Recorder())
        found.append(loop() - idle)
        spans.record(None)
    return statistics.median(found)


def audits(comm: Any, optimizer: Any, rounds: int) -> list[float]:
    """Seconds of each comparison."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        parameter_audit.compare(comm, optimizer, "benchmark")
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=128, help="images on each rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    comm = create_communicator()
    updater = updater_for(comm, args.batch)
    samples, per_step = steps(updater, args.rounds)
    span, audit = seconds_of_a_span(), audits(comm, updater.get_optimizer("main"), args.rounds)
    if comm.rank:
        return
    results: dict[str, Any] = {name: harness.summarize(values) for name, values in samples.items()}
    plain = results["plain"]["median_seconds"]
    pairs = [traced / alone for alone, traced in zip(samples["plain"], samples["traced"])]
    results |= {
        "spans_per_step": per_step,
        "seconds_per_span": span,
        "trace_fraction_by_spans": per_step * span / plain,
        "trace_fraction_by_steps": statistics.median(pairs) - 1,
        "audit": harness.summarize(audit),
        "audit_fraction": statistics.median(audit) / (AUDIT_STEPS * plain),
    }
    print(f"{comm.size} ranks, {args.batch} images each: a step of {1e3 * plain:.1f} ms")
    print(
        f"trace: {per_step:.0f} spans of {1e6 * span:.2f} us, {results['trace_fraction_by_spans']:.3%} of a step; "
        f"steps in turns differ by {results['trace_fraction_by_steps']:+.2%} in the median"
    )
    print(f"audit every {AUDIT_STEPS} steps: {1e3 * statistics.median(audit):.2f} ms, {results['audit_fraction']:.3%}")
    if args.record:
        print(harness.record("trace-cost", {"ranks": comm.size, "batch": args.batch, "rounds": args.rounds}, results))


if __name__ == "__main__":
    main()
