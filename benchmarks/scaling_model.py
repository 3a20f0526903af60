"""How a step scales: a model of reductions from its parts, beside what was measured here, and curves to 1,024 ranks.

The parts, each measured with p ranks of which all are at work, so that ranks beyond the cores share them:

- alpha and beta: a message that each rank sends to the next one while it gets one: a line through 4 KiB and 16 MiB;
- m: a meeting of the ranks (``Ibarrier``, waited for as dbrdist does), on one host and over two;
- sigma: seconds for a byte that a rank reads or writes in a sum, measured with a rank on each core. With more ranks
  than cores, a rank does its part in one of ceil(ranks / cores) turns.
- c: what ``flat`` takes for 4 KiB on two ranks of one host beyond a meeting and messages: Python.

With n bytes, from 64 KiB on, ``flat`` on one host takes c + 3 m + turns 2 n sigma: each rank adds its part of the
arrays of all, in shared memory, and writes it to all. Between two hosts the sums of the hosts travel, in all n bytes,
as an exchange of halves: 2 alpha + n (beta + 1.5 sigma turns) of two ranks, one on each. Smaller arrays, and
``MPI_Allreduce`` of all arrays on one host, travel by messages in a ring (Thakur et al. 2005): 2 (p - 1) alpha +
(p - 1) / p n (2 beta + 3 sigma turns). The second host is a namespace (``two_hosts.py``: root and Linux), reached over
a cable of 1 Gb/s; without root there are figures for one host alone. There ``flat`` sends MPI's messages, whose
latency the model knows, and not over its own connections, which it would take by itself.

The curves take nominal latencies and bandwidths, ResNet-50's gradients in 16 bits and a step of 32 images that takes
0.179 s on one GPU: Akiba et al. 2017 (arXiv 1711.04325) report 0.255 s for each of 1,024, at 70 % efficiency.
Communication is hidden either not at all or behind 120 ms of backward (Goyal et al. 2017, arXiv 1706.02677).

    python benchmarks/scaling_model.py --record
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import numpy as np
import ranks
import two_hosts

SIZES = [1 << k for k in range(12, 26, 2)]  # bytes
COUNTS = (2, 3, 4)
PLACES = {"one host": 1, "two hosts": 2}
RATE = "1gbit"
SHARED_FROM_BYTES = 1 << 16
CHUNK_BYTES = 1 << 17  # of an array that is added at a time
GRADIENT_BYTES = 25_557_032 * 2  # ResNet-50, in 16 bits
STEP_SECONDS = 0.255 * 0.70
HIDDEN_SECONDS = 0.120
NUM_CORES = os.cpu_count() or 1


class Network(NamedTuple):
    """Of the curves: nominal seconds and bytes a second, between nodes and within one."""

    latency: float
    bandwidth: float  # of a node, each way
    ranks_per_node: int = 1
    latency_within: float = 0.0
    bandwidth_within: float = 1.0  # of a rank, each way


NETWORKS = {
    "10 GbE": Network(30e-6, 1.25e9),
    "100 Gb/s": Network(5e-6, 12.5e9),
    "2 x FDR InfiniBand, 8 GPUs on PCIe": Network(5e-6, 14e9, 8, 10e-6, 10e9),
    "NVLink 300 GB/s, 8 x 200 Gb/s InfiniBand": Network(5e-6, 200e9, 8, 5e-6, 300e9),
}
PUBLISHED = [  # whose, efficiency, ranks, on what like that
    ("ChainerMN (arXiv 1710.11351), against 1 GPU", 0.90, 128, "2 x FDR InfiniBand, 8 GPUs on PCIe"),
    ("Akiba et al. (arXiv 1711.04325), against 1 GPU", 0.70, 1024, "2 x FDR InfiniBand, 8 GPUs on PCIe"),
    ("Akiba et al. (arXiv 1711.04325), against 8 GPUs", 0.80, 1024, "2 x FDR InfiniBand, 8 GPUs on PCIe"),
]


# ---- the model -------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What a reduction is made of, in seconds and seconds a byte; see above."""

    alpha: float
    beta: float
    meeting: float
    sigma: float
    call: float
    turns: int


def ring_seconds(p: int, num_bytes: float, alpha: float, beta: float, adding: float = 0.0) -> float:
    """Of messages in a ring; ``adding`` is what a rank takes for the sum of a byte."""
    return 2 * (p - 1) * alpha + (p - 1) / p * num_bytes * (2 * beta + adding)


def message_seconds(p: int, num_bytes: float, parts: Parts) -> float:
    """Of ``MPI_Allreduce`` on one host."""
    return ring_seconds(p, num_bytes, parts.alpha, parts.beta, 3 * parts.sigma * parts.turns)


def flat_seconds(p: int, num_bytes: float, parts: Parts, pair: Parts | None = None) -> float:
    """Of ``flat``, on one host, or on two, of which ``pair`` has the parts of one rank on each."""
    if num_bytes < SHARED_FROM_BYTES:
        return parts.call + parts.meeting + message_seconds(p, num_bytes, parts)
    within = 2 * num_bytes * parts.sigma * parts.turns
    if pair is None:
        return parts.call + 3 * parts.meeting + within
    between = ring_seconds(2, num_bytes, pair.alpha, pair.beta, 3 * parts.sigma * parts.turns)
    return parts.call + parts.meeting + between + (within if p > 2 else 0.0)


def fit(messages: list[list[float]]) -> tuple[float, float]:
    """Alpha and beta of the line through the shortest message and the longest, none negative."""
    (small, soon), (large, late) = messages[0], messages[-1]
    beta = max((late - soon) / (large - small), 0.0)
    return max(soon - small * beta, 0.0), beta


def parts_of(measured: dict[str, dict[int, Any]]) -> dict[str, dict[int, Parts]]:
    """For each place and number of ranks."""
    least = measured["one host"][2]
    found: dict[str, dict[int, Parts]] = {}
    call = 0.0
    for place, of_ranks in measured.items():
        found[place] = {}
        for p, times in of_ranks.items():
            alpha, beta = fit(times["messages"])
            turns = math.ceil(p / NUM_CORES)
            parts = Parts(alpha, beta, times["meeting"], least["sigma"], call, turns)
            if not call:  # the first are two ranks of one host
                size, seconds = least["flat"][0]
                call = max(seconds - parts.meeting - message_seconds(2, size, parts), 0.0)
                parts = parts._replace(call=call)
            found[place][p] = parts
    return found


def efficiency(p: int, network: Network, hidden: float) -> float:
    """Throughput of a rank among that many, as a part of one alone: sums within nodes, and between them."""
    within = min(p, network.ranks_per_node)
    nodes = math.ceil(p / within)
    seconds = ring_seconds(within, GRADIENT_BYTES, network.latency_within, 1 / network.bandwidth_within)
    seconds += ring_seconds(nodes, GRADIENT_BYTES, network.latency, 1 / network.bandwidth)
    return STEP_SECONDS / (STEP_SECONDS + max(seconds - hidden, 0.0))


# ---- measurements, on each rank --------------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Times of the slowest rank: the median where ranks wait for cores, else the shortest."""
    from mpi4py import MPI

    from dbrdist.comm import create_communicator

    world, comm = MPI.COMM_WORLD, create_communicator("flat", overlap=False, sockets=False)
    typical = min if world.size <= NUM_CORES else statistics.median

    def timed(run: Callable[[], Any]) -> float:
        found = []
        for _ in range(rounds + 1):  # the first one warms up
            world.Barrier()
            began = time.perf_counter()
            run()
            found.append(world.allreduce(time.perf_counter() - began, MPI.MAX))
        return typical(found[1:])

    makers = {"messages": messages, "flat": flat_reduction, "MPI_Allreduce": plain_reduction}
    times: dict[str, Any] = {
        name: [[size, timed(run)] for size in SIZES for run in [make(comm, size)]] for name, make in makers.items()
    }
    times["meeting"] = timed(meeting(comm))
    a, b = (np.ones(SIZES[-1] // 4, np.float32) for _ in range(2))
    times["sigma"] = timed(lambda: add(a, b)) / (4 * a.nbytes)
    return times


def flat_reduction(comm: Any, size: int) -> Callable[[], Any]:
    """The gradients of a model with one parameter of that many bytes, by ``flat``."""
    from dbrdist.core.link import Link
    from dbrdist.core.parameter import Parameter

    model = Link()
    with model.init_scope():
        model.w = Parameter(np.zeros(size // 4, np.float32))
    model.w.grad = np.ones(size // 4, np.float32)
    return lambda: comm.multi_node_mean_grad(model)


def plain_reduction(comm: Any, size: int) -> Callable[[], Any]:
    """An array of that many bytes, by MPI."""
    from mpi4py import MPI

    x = np.zeros(size // 4, np.float32)
    return lambda: comm.mpi_comm.Allreduce(MPI.IN_PLACE, x)


def messages(comm: Any, size: int) -> Callable[[], Any]:
    """A message of that many bytes from each rank to the next."""
    a, b = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.mpi_comm.Sendrecv(a, after, recvbuf=b, source=before)


def meeting(comm: Any) -> Callable[[], Any]:
    """A barrier, waited for in dbrdist's way."""
    from types import SimpleNamespace

    from dbrdist.comm import mpi

    call: Any = SimpleNamespace(is_waiting=False, pause_seconds=0.0, error="")
    return lambda: mpi.wait_until(comm.mpi_comm.Ibarrier().Test, call)


def add(a: Any, b: Any) -> None:
    """The sum of two arrays into both, in chunks: two reads and two writes of memory."""
    step = CHUNK_BYTES // a.itemsize
    for begin in range(0, a.size, step):
        part = slice(begin, begin + step)
        np.add(a[part], b[part], out=a[part])
        b[part] = a[part]


# ---- the program -----------------------------------------------------------------------------------------------------


def run_all(rounds: int, places: dict[str, int]) -> dict[str, dict[int, Any]]:
    """What all numbers of ranks measure, by place."""
    measured: dict[str, dict[int, Any]] = {}
    for place, num_hosts in places.items():
        with two_hosts.TwoHosts(RATE) if num_hosts == 2 else contextlib.nullcontext() as hosts:
            words = [__file__, "--worker", "--rounds", str(rounds if num_hosts == 1 else max(rounds // 4, 2))]
            measured[place] = {p: ranks.run(words, sys.executable, p, hosts) for p in COUNTS}
    return measured


def compare(measured: dict[str, dict[int, Any]], parts: dict[str, dict[int, Parts]]) -> list[dict[str, Any]]:
    """Each reduction beside its prediction, printed."""
    rows = []
    for place, of_ranks in measured.items():
        for p, times in of_ranks.items():
            own = parts[place][p]
            pair = parts[place][2] if place == "two hosts" else None
            found = [("flat", size, s, flat_seconds(p, size, own, pair)) for size, s in times["flat"]]
            if pair is None:
                found += [
                    ("MPI_Allreduce", size, s, message_seconds(p, size, own)) for size, s in times["MPI_Allreduce"]
                ]
            for name, size, seconds, predicted in found:
                row = {"place": place, "ranks": p, "name": name, "bytes": size}
                rows.append(row | {"seconds": seconds, "predicted": predicted})
                shown = f"measured {1e6 * seconds:9.1f} us, predicted {1e6 * predicted:9.1f} us"
                print(f"{place}, {p} ranks, {name:<13} {size:>10,} bytes: {shown}, {predicted / seconds:.2f}")
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Predicted over measured by place, ranks and way: the median over sizes and the worst, printed."""
    found: dict[str, Any] = {}
    for row in rows:
        label = f"{row['place']}, {row['ranks']} ranks, {row['name']}"
        found.setdefault(label, []).append(row["predicted"] / row["seconds"])
    result = {}
    for label, values in found.items():
        result[label] = {
            "median": statistics.median(values), "min": min(values), "max": max(values), "longest": values[-1]
        }  # fmt: skip
        shown = ", ".join(f"{name} {value:.2f}" for name, value in result[label].items())
        print(f"predicted / measured, {label}: {shown}")
    return result


def curves() -> dict[str, Any]:
    """Efficiency on 2 to 1,024 ranks, printed, and beside what was published."""
    counts = [2**k for k in range(1, 11)]
    print(f"{'efficiency':<58}" + "".join(f"{n:>6}" for n in counts))
    rows: dict[str, Any] = {}
    for name, network in NETWORKS.items():
        for hidden in (0.0, HIDDEN_SECONDS):
            label = f"{name}, {1e3 * hidden:.0f} ms hidden"
            rows[label] = [efficiency(n, network, hidden) for n in counts]
            print(f"{label:<58}" + "".join(f"{value:6.2f}" for value in rows[label]))
    published = []
    for whose, value, p, name in PUBLISHED:
        one = 8 if whose.endswith("8 GPUs") else 1
        beside = efficiency(p, NETWORKS[name], 0.0) / (efficiency(one, NETWORKS[name], 0.0) if one > 1 else 1.0)
        published.append({"whose": whose, "ranks": p, "published": value, "nothing hidden": beside})
        print(f"{whose}, {p:,} GPUs: published {value:.0%}, computed with nothing hidden {beside:.0%}")
    return {"ranks": counts, "curves": rows, "published": published}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="a quarter of them on two hosts")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        ranks.answer(measure(args.rounds))
        return
    refused = two_hosts.refusal()
    if refused:
        print(f"one host alone: {refused}")
    measured = run_all(args.rounds, {"one host": 1} if refused else PLACES)
    parts = parts_of(measured)
    for place, of_ranks in parts.items():
        for p, found in of_ranks.items():
            shown = f"alpha {1e6 * found.alpha:.1f} us, beta {1e9 * found.beta:.3f} ns a byte, "
            print(f"{place}, {p} ranks: {shown}meeting {1e6 * found.meeting:.1f} us, {found.turns} turns")
    two = parts["one host"][2]
    print(f"sigma {1e9 * two.sigma:.4f} ns a byte, call {1e6 * two.call:.1f} us")
    rows = compare(measured, parts)
    summary, drawn = ratios(rows), curves()
    if args.record:
        fitted = {place: {str(p): v._asdict() for p, v in found.items()} for place, found in parts.items()}
        results = {"fitted": fitted, "measured": measured, "reductions": rows, "ratios": summary, "efficiency": drawn}
        settings = {"rounds": args.rounds, "sizes": SIZES, "rate": RATE, "num_cores": NUM_CORES}
        print(harness.record("scaling-model", settings, results))


if __name__ == "__main__":
    main()
