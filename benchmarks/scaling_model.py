"""How a step scales: a model of reductions from its parts, beside what was measured here, and curves to 1,024 ranks.

The parts, none of them measured by a reduction that they predict (but for c), with p ranks at work:

- alpha and beta: a message that each rank sends to the next one while it gets one: a line through 4 KiB and 16 MiB;
- m and m': a meeting (``Ibarrier``, waited for as dbrdist does) of all ranks and of those of a host;
- r: a row that each rank shows to all before it reduces (``barrier``), with the Python around it;
- tau: CPU seconds for a byte when a host's ranks each add their part of all their arrays and write it to all of them:
  one figure for what fits into the second-level cache, from 512 KiB, one beyond it, from 16 MiB;
- sigma: seconds for a byte that is read or written in MPI's sum of two arrays, with a rank on each core;
- c: what ``flat`` takes for 4 KiB on two ranks of one host beyond rows, meetings and messages: Python.

Ranks that share a core change three things. They compute in turns, ceil(ranks / cores) one after the other: c, tau and
sigma count that often. They take each other's caches: tau is CPU time, in which no wait counts, and was 1.1 ms for 16
MiB with a rank on each core, 1.6 to 1.9 ms with two. And a rank that waits must leave the core: it looks 20 times, then
naps, which takes some 70 us however short the nap is (the kernel's timer slack of 50 us, and a change of processes), so
that each round of messages in a meeting costs a nap. That is in m, m' and r, which are 10 to 100 times as long as with
a core each.

With n bytes, from 64 KiB on, ``flat`` on one host takes c turns + r + 2 m + turns n tau. Between two hosts the sums of
the hosts travel, in all n bytes, as an exchange of halves: c turns + r + 2 m' + 2 alpha + n (beta + 1.5 sigma turns),
with alpha and beta of two ranks, one on each, and where hosts have several ranks turns n tau. Smaller arrays go by
messages: c turns + r + 2 m (an allreduce has twice the rounds of a barrier; their bytes count for nothing, nor does the
cable count 256 KiB that come at once). ``MPI_Allreduce`` of all arrays on one host halves and doubles (Rabenseifner
2004; Thakur et al. 2005): with q the largest power of two in p, 2 log2(q) alpha + (q - 1) / q n (2 beta + 3 sigma
turns), and where p is not q, 2 alpha + n (2 beta + 3 sigma turns) before and after. That is the model of a library that
is not ours, for comparison: with 2 ranks it took 1.4 to 2 times as long from 16 KiB on, since its messages inside a sum
are slower than those of pairs; on shared cores it yields where bare messages wait, and took less for short arrays. The
second host is a namespace (``two_hosts.py``: root and Linux), reached over a cable of 1 Gb/s and with half of the
cores; without root there are figures for one host alone. There ``flat`` sends MPI's messages, whose latency the model
knows, and not over its own connections, which it would take by itself.

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
SUMMED_BYTES = 1 << 19, 1 << 24  # within the second-level cache, and beyond it
CACHE_BYTES = 1 << 21  # of a core
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
    meeting_on_host: float
    row: float
    sum_cached: float
    sum_beyond: float
    sigma: float
    call: float
    turns: int


def ring_seconds(p: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Of messages in a ring."""
    return 2 * (p - 1) * alpha + (p - 1) / p * num_bytes * 2 * beta


def halving_seconds(p: int, num_bytes: float, alpha: float, beta: float, adding: float) -> float:
    """Of a reduce-scatter by halving and an allgather by doubling; ``adding`` is what a rank takes to add a byte."""
    rounds = p.bit_length() - 1
    q = 1 << rounds
    seconds = 2 * rounds * alpha + (q - 1) / q * num_bytes * (2 * beta + adding)
    return seconds + (0.0 if p == q else 2 * alpha + num_bytes * (2 * beta + adding))


def message_seconds(p: int, num_bytes: float, parts: Parts) -> float:
    """Of ``MPI_Allreduce`` on one host."""
    return halving_seconds(p, num_bytes, parts.alpha, parts.beta, 3 * parts.sigma * parts.turns)


def flat_seconds(p: int, num_bytes: float, parts: Parts, pair: Parts | None = None) -> float:
    """Of ``flat``, on one host, or on two, of which ``pair`` has the parts of one rank on each."""
    begin = parts.call * parts.turns + parts.row
    if num_bytes < SHARED_FROM_BYTES:
        return begin + 2 * parts.meeting
    per_byte = parts.sum_cached if num_bytes <= CACHE_BYTES else parts.sum_beyond
    within = parts.turns * num_bytes * per_byte
    if pair is None:
        return begin + 2 * parts.meeting + within
    between = halving_seconds(2, num_bytes, pair.alpha, pair.beta, 3 * parts.sigma * parts.turns)
    return begin + 2 * parts.meeting_on_host + between + (within if p > 2 else 0.0)


def fit(messages: list[list[float]]) -> tuple[float, float]:
    """Alpha and beta of the line through the shortest message and the longest, none negative."""
    (small, soon), (large, late) = messages[0], messages[-1]
    beta = max((late - soon) / (large - small), 0.0)
    return max(soon - small * beta, 0.0), beta


def parts_of(measured: dict[str, dict[int, Any]]) -> dict[str, dict[int, Parts]]:
    """For each place and number of ranks."""
    least = measured["one host"][2]  # one rank on each core
    size, seconds = least["flat"][0]
    call = max(seconds - flat_seconds(2, size, _parts(least, least["sigma"], 0.0, 2)), 0.0)
    return {
        place: {p: _parts(times, least["sigma"], call, p) for p, times in of_ranks.items()}
        for place, of_ranks in measured.items()
    }


def _parts(times: dict[str, Any], sigma: float, call: float, p: int) -> Parts:
    alpha, beta = fit(times["messages"])
    meetings = times["meeting"], times["meeting_on_host"], times["row"]
    return Parts(alpha, beta, *meetings, *times["sums"], sigma, call, math.ceil(p / NUM_CORES))


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

    def timed(run: Callable[[], Any], repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
        found = []
        for _ in range(rounds + 1):  # the first one warms up
            world.Barrier()
            began = clock()
            for _ in range(repeats):  # a rank that has ended looks for the others, on a core that these may need
                run()
            found.append(world.allreduce(clock() - began, MPI.MAX) / repeats)
        return typical(found[1:])

    def timed_by_size(make: Callable[[Any, int], Callable[[], Any]]) -> list[list[float]]:
        return [[size, timed(make(comm, size), 8 if size < 1 << 20 else 2)] for size in SIZES]

    makers = {"messages": messages, "flat": flat_reduction, "MPI_Allreduce": plain_reduction}
    times: dict[str, Any] = {name: timed_by_size(make) for name, make in makers.items()}
    times["meeting"] = timed(meeting(comm.mpi_comm), 16)
    on_host = comm.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    times["meeting_on_host"] = timed(meeting(on_host), 16)
    times["row"] = timed(comm.barrier, 16)
    times["sums"] = [timed(sums(comm, size), 16, time.process_time) / size for size in SUMMED_BYTES]
    a, b = (np.ones(SIZES[-1] // 4, np.float32) for _ in range(2))
    times["sigma"] = timed(lambda: add(a, b)) / (4 * a.nbytes)
    return times


def flat_reduction(comm: Any, size: int) -> Callable[[], Any]:
    """The gradients of a model with one parameter of that many bytes, by ``flat``."""
    from dbrdist.core.model.link import Link
    from dbrdist.core.model.parameter import Parameter

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


def meeting(mpi_comm: Any) -> Callable[[], Any]:
    """A barrier, waited for in dbrdist's way."""
    from types import SimpleNamespace

    from dbrdist.comm.transport import mpi

    call: Any = SimpleNamespace(is_waiting=False, pause_seconds=0.0, error="")
    return lambda: mpi.wait_until(mpi_comm.Ibarrier().Test, call)


def sums(comm: Any, size: int) -> Callable[[], Any]:
    """What a rank adds of an array of that many bytes: its part of as many arrays as the host has ranks."""
    from dbrdist.comm.transport import message
    from dbrdist.comm.transport.host_memory import Segment

    k = max(comm.intra_size, 2)
    part = size // k // 4  # elements
    segments = [Segment(4 * part) for _ in range(k)]
    arrays = [segment.raw[: 4 * part].view(np.float32) for segment in segments]

    def run() -> list[Any]:
        for begin in range(0, arrays[0].size, CHUNK_BYTES // 4):
            first, *others = (a[begin : begin + CHUNK_BYTES // 4] for a in arrays)
            message.weighted_sum([first, *others], None, float(k), out=first)
            for other in others:
                other[...] = first
        return segments  # which hold the memory

    return run


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
            waits = {
                "alpha": found.alpha,
                "meeting": found.meeting,
                "on a host": found.meeting_on_host,
                "row": found.row,
            }
            shown = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in waits.items())
            bytes_ = {"beta": found.beta, "sum in cache": found.sum_cached, "sum beyond": found.sum_beyond}
            shown += "; " + ", ".join(f"{name} {1e9 * seconds:.3f}" for name, seconds in bytes_.items())
            print(f"{place}, {p} ranks: {shown} ns a byte; {found.turns} turns")
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
