"""State divided over ranks and compressed gradients: bytes per rank, bytes on the wire, time of a step.

Run under mpiexec; all candidates take turns in the same processes. A time is that of the slowest rank. The model is a
chain of square layers of about ``--millions`` parameters in float32; forward and backward are left out, gradients lie
there. Goals: ZeRO-1 with Adam on 2 ranks half of the state per rank, at most 1.1 of the plain step.

    mpiexec -n 2 python benchmarks/sharing.py --record
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import harness
import numpy as np

from dbrdist import links, optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients import shared_gradients
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.core.model.chain import ChainList

WIDTH = 1024
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "PowerSGD rank 2": {"compression": PowerSGD(2)},
    "PowerSGD rank 4": {"compression": PowerSGD(4)},
    "top 1 %": {"compression": TopK(0.01)},
}
LINES = {"1 Gb/s": 125e6, "100 Mb/s": 12.5e6}  # bytes a second


def made(comm: Any, num_layers: int, options: dict[str, Any]) -> Any:
    model = ChainList(*[links.Linear(WIDTH, WIDTH) for _ in range(num_layers)])
    optimizer = create_multi_node_optimizer(optimizers.Adam().setup(model), comm, **options)
    rng = np.random.default_rng(comm.rank)
    for p in model.params():
        p.grad = rng.normal(size=p.shape).astype(np.float32)
    return optimizer


def step_seconds(comm: Any, optimizer: Any) -> float:
    comm.barrier()
    began = time.perf_counter()
    optimizer.update()
    return float(max(comm.allgather_obj(time.perf_counter() - began)))


def state_bytes(optimizer: Any) -> int:
    return sum(a.nbytes for p in optimizer.target.params() for a in p.update_rule.state.values())


def wire_bytes(options: dict[str, Any], num_bytes: int, size: int, num_steps: int) -> float:
    """What one rank sends in a step: rings for reductions, to everyone for top-k."""
    compression = options.get("compression")
    if compression is None:
        return 2 * num_bytes * (size - 1) / size
    sent = compression.num_bytes / num_steps
    return sent * (size - 1) if isinstance(compression, TopK) else 2 * sent * (size - 1) / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--millions", type=float, default=12.6, help="of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    comm = create_communicator("flat")
    num_layers = max(round(args.millions * 1e6 / WIDTH**2), 1)
    found = {name: made(comm, num_layers, options) for name, options in WAYS.items()}
    samples: dict[str, list[float]] = {name: [] for name in found}
    for number in range(args.rounds + 2):
        for name, optimizer in found.items():
            seconds = step_seconds(comm, optimizer)
            if number >= 2:
                samples[name].append(seconds)
    results = {}
    for name, optimizer in found.items():
        arena = next(iter(optimizer.target.params())).slot.arena
        sent = wire_bytes(WAYS[name], arena.grad.nbytes, comm.size, args.rounds + 2)
        results[name] = {
            "step_seconds": statistics.median(samples[name]),
            "ratio_to_plain": statistics.median(a / b for a, b in zip(samples[name], samples["plain"])),
            "state_bytes_per_rank": comm.allgather_obj(state_bytes(optimizer)),
            "gradient_bytes_per_rank": comm.allgather_obj(shared_gradients.resident_bytes(arena)),
            "sent_bytes_per_step": sent,
            "computed_seconds": {line: sent / speed for line, speed in LINES.items()},
        }
    if comm.rank == 0:
        for name, r in results.items():
            times = ", ".join(f"{1e3 * s:,.1f} ms at {line}" for line, s in r["computed_seconds"].items())
            print(f"{name:<16} {1e3 * r['step_seconds']:8.2f} ms, {r['ratio_to_plain']:.2f} of plain; state "
                  f"{max(r['state_bytes_per_rank']):,}, gradients {max(r['gradient_bytes_per_rank']):,} bytes; sent "
                  f"{r['sent_bytes_per_step']:,.0f} bytes: {times}")  # fmt: skip
        if args.record:
            settings = {"num_ranks": comm.size, "num_rounds": args.rounds, "num_layers": num_layers, "width": WIDTH}
            print(harness.record("sharing", settings, results))


if __name__ == "__main__":
    main()
