"""How a step scales: a model of reductions fitted on two ranks of this host, checked on three and four, and curves.

Measured are alpha and beta of a message (Sendrecv of several sizes between two ranks), sigma, the seconds that two
cores together need to read or write a byte in a sum of arrays, c, what ``flat`` takes for 4 KiB on two ranks, and
b(p), a barrier of p ranks, which waits for turns on a core where there are more ranks than cores. With n bytes

- ``flat`` on one host has each rank add and write its part of all p arrays in shared memory, between two barriers:
  c + 2 (b(p) - b(2)) + 2 p n sigma;
- messages in a ring (``MPI_Allreduce`` of long arrays, Thakur et al. 2005) take
  2 (p - 1) (alpha + (b(p) - b(2)) / ceil(log2 p)) + 2 (p - 1) / p n beta, and (p - 1) / p n sums of three passes.

Where ranks wait for a core, what is predicted is the order of magnitude. The curves take the ring with nominal
bandwidths and this host's alpha, a step of ResNet-50 of 32 images in 0.255 s (Akiba et al. 2017, arXiv 1711.04325: 125
images/s for each of 1,024 GPUs), gradients in 16 bits, and hide communication either not at all or behind 120 ms of
backward (Goyal et al. 2017, arXiv 1706.02677).

    python benchmarks/scaling_model.py --record
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np

SIZES = [1 << k for k in range(12, 26, 2)]  # bytes
COUNTS = (2, 3, 4)
CHUNK_BYTES = 1 << 18  # of an array that is added at a time
BANDWIDTHS = {"10 GbE": 1.25e9, "100 Gb/s": 12.5e9, "2 x FDR InfiniBand": 14e9}  # nominal, bytes a second
GRADIENT_BYTES = 25_557_032 * 2  # ResNet-50, in 16 bits
STEP_SECONDS = 0.255
HIDDEN_SECONDS = 0.120
PUBLISHED = {"ChainerMN (arXiv 1710.11351), 128 GPUs": 0.90, "Goyal et al. (arXiv 1706.02677), 256 GPUs": 0.90}


# ---- the model -------------------------------------------------------------------------------------------------------


def turn(p: int, fitted: dict[str, float]) -> float:
    """What a barrier of that many ranks takes longer than one of two."""
    return max(fitted[f"barrier {p}"] - fitted["barrier 2"], 0.0)


def shared_seconds(p: int, num_bytes: float, fitted: dict[str, float]) -> float:
    """Of ``flat`` on one host."""
    return fitted["call"] + 2 * turn(p, fitted) + 2 * p * num_bytes * fitted["sigma"]


def ring_seconds(p: int, num_bytes: float, alpha: float, beta: float, adding: float = 0.0) -> float:
    """Of messages in a ring; ``adding`` is what a rank takes for the sum of a byte."""
    return 2 * (p - 1) * alpha + (p - 1) / p * num_bytes * (2 * beta + adding)


def message_seconds(p: int, num_bytes: float, fitted: dict[str, float]) -> float:
    """Of ``MPI_Allreduce`` on one host."""
    alpha, beta, sigma = fitted["alpha"], fitted["beta"], fitted["sigma"]
    return ring_seconds(p, num_bytes, alpha + turn(p, fitted) / math.ceil(math.log2(p)), beta, 3 * 2 * sigma)


MODELS: dict[str, Callable[[int, float, dict[str, float]], float]] = {
    "flat": shared_seconds,
    "MPI_Allreduce": message_seconds,
}


def fit(measured: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Alpha and beta of the least relative error over the messages, none negative, and what is taken as measured."""
    two = measured[2]
    sizes, times = (np.array(column, float) for column in zip(*two["messages"]))
    columns = np.stack([1 / times, sizes / times], 1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    found = {"alpha": max(float(alpha), 0.0), "beta": max(float(beta), 0.0)}
    barriers = {f"barrier {p}": times["barrier"] for p, times in measured.items()}
    return {**found, "sigma": two["sigma"], "call": two["flat"][0][1], **barriers}


def efficiency(p: int, alpha: float, bandwidth: float, hidden: float) -> float:
    """Throughput of a rank among that many, as a part of one alone."""
    exposed = max(ring_seconds(p, GRADIENT_BYTES, alpha, 1 / bandwidth) - hidden, 0.0)
    return STEP_SECONDS / (STEP_SECONDS + exposed)


# ---- measurements, on each rank ----------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Times of the slowest rank, the median where ranks wait for cores, else the shortest; messages on two ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    typical = min if world.size <= (os.cpu_count() or 1) else statistics.median

    def timed(run: Callable[[], Any]) -> float:
        found = []
        for _ in range(rounds + 1):  # the first one warms up
            world.Barrier()
            began = time.perf_counter()
            run()
            found.append(world.allreduce(time.perf_counter() - began, MPI.MAX))
        return typical(found[1:])

    times: dict[str, Any] = {
        name: [[size, timed(run)] for size in SIZES for run in [make(size)]]
        for name, make in {"flat": flat_reduction, "MPI_Allreduce": plain_reduction}.items()
    }
    times["barrier"] = timed(world.Barrier)
    if world.size == 2:
        times["messages"] = [[size, timed(run)] for size in SIZES for run in [messages(size)]]
        arrays = [np.ones(SIZES[-1] // 4, np.float32) for _ in range(3)]
        times["sigma"] = timed(lambda: add(*arrays)) / (world.size * 3 * arrays[0].nbytes)
    return times


def flat_reduction(size: int) -> Callable[[], Any]:
    """The gradients of a model with one parameter of that many bytes, by ``flat``."""
    from dbrdist.comm import create_communicator
    from dbrdist.core.link import Link
    from dbrdist.core.parameter import Parameter

    comm, model = create_communicator("flat"), Link()
    with model.init_scope():
        model.w = Parameter(np.zeros(size // 4, np.float32))
    model.w.grad = np.ones(size // 4, np.float32)
    return lambda: comm.multi_node_mean_grad(model)


def plain_reduction(size: int) -> Callable[[], Any]:
    """An array of that many bytes, by MPI."""
    from mpi4py import MPI

    x = np.zeros(size // 4, np.float32)
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)


def messages(size: int) -> Callable[[], Any]:
    """A message of that many bytes each way between two ranks."""
    from mpi4py import MPI

    world, a, b = MPI.COMM_WORLD, np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    return lambda: world.Sendrecv(a, 1 - world.rank, recvbuf=b, source=1 - world.rank)


def add(a: Any, b: Any, out: Any) -> None:
    """A sum in chunks: two reads and a write of memory."""
    step = CHUNK_BYTES // a.itemsize
    for begin in range(0, a.size, step):
        part = slice(begin, begin + step)
        np.add(a[part], b[part], out=out[part])


# ---- the program -----------------------------------------------------------------------------------------------------


def run_ranks(num_ranks: int, rounds: int) -> dict[str, Any]:
    """What that many ranks measure."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measured.json")
        mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(num_ranks)]
        command = [*mpiexec, sys.executable, __file__, "--rounds", str(rounds), "--worker", str(out)]
        paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "launch")])
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        subprocess.run(command, env={**os.environ, **threads, "PYTHONPATH": paths}, check=True, timeout=300)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def compare(measured: dict[int, dict[str, Any]], fitted: dict[str, float]) -> list[dict[str, Any]]:
    """Each reduction beside its prediction, printed."""
    rows = []
    for p, times in measured.items():
        for name, model in MODELS.items():
            for size, seconds in times[name]:
                predicted = model(p, size, fitted)
                rows.append({"ranks": p, "name": name, "bytes": size, "seconds": seconds, "predicted": predicted})
                shown = f"measured {1e6 * seconds:9.1f} us, predicted {1e6 * predicted:9.1f} us"
                print(f"{p} ranks, {name:<13} {size:>10,} bytes: {shown}, {predicted / seconds:.2f}")
    return rows


def curves(alpha: float) -> dict[str, list[float]]:
    """Efficiency on 2 to 1,024 ranks, printed."""
    counts = [2**k for k in range(1, 11)]
    print(f"{'efficiency':<34}" + "".join(f"{n:>6}" for n in counts))
    rows = {}
    for name, bandwidth in BANDWIDTHS.items():
        for hidden in (0.0, HIDDEN_SECONDS):
            label = f"{name}, {1e3 * hidden:.0f} ms hidden"
            rows[label] = [efficiency(n, alpha, bandwidth, hidden) for n in counts]
            print(f"{label:<34}" + "".join(f"{value:6.2f}" for value in rows[label]))
    for name, value in PUBLISHED.items():
        print(f"published: {name}: {value:.0%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        from mpi4py import MPI

        found = measure(args.rounds)
        if MPI.COMM_WORLD.rank == 0:
            args.worker.write_text(json.dumps(found))
        return
    measured = {p: run_ranks(p, args.rounds) for p in COUNTS}
    fitted = fit(measured)
    print(f"beta {1e9 * fitted['beta']:.3f} ns a byte, sigma {1e9 * fitted['sigma']:.3f} ns a byte")
    print(", ".join(f"{name} {1e6 * fitted[name]:.1f} us" for name in fitted if name not in ("beta", "sigma")))
    rows = compare(measured, fitted)
    drawn = curves(fitted["alpha"])
    if args.record:
        results = {"fitted": fitted, "messages": measured[2]["messages"], "reductions": rows, "efficiency": drawn}
        print(harness.record("scaling-model", {"rounds": args.rounds, "sizes": SIZES}, results))


if __name__ == "__main__":
    main()
