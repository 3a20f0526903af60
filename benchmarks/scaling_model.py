"""How a step scales: an alpha-beta model fitted on this machine, checked here, and drawn out to 1,024 ranks.

A reduction of n bytes over p ranks by a ring takes 2 (p - 1) alpha + 2 (p - 1) / p n beta (Thakur et al. 2005). Alpha
and beta are fitted to MPI reductions of several sizes on 2 ranks, and predict those on 3 and 4. With --model the
curves for other networks follow from their published latency and bandwidth, with and without overlap of 60 % of the
step, beside the published point of ChainerMN, 90 % at 128 GPUs (Akiba et al. 2017, arXiv 1710.11351). Each call under
mpiexec measures one number of ranks; the first one fits.

    for n in 2 3 4; do mpiexec -n $n python benchmarks/scaling_model.py --out fit.json; done
    python benchmarks/scaling_model.py --out fit.json --model
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [1 << k for k in range(12, 25, 2)]  # bytes
NETWORKS = {  # latency in seconds, bytes a second of one rank: nominal figures
    "10 GbE": (25e-6, 1.25e9),
    "100 Gb/s": (5e-6, 12.5e9),
    "NVLink + InfiniBand": (3e-6, 25e9),
}
GRADIENT_BYTES = 25_557_032 * 2  # ResNet-50, in 16 bits
STEP_SECONDS = 0.26  # 32 images on a P100 at about 125 images a second, forward and backward
OVERLAP_FRACTION = 0.6  # of the step in which gradients can travel
PUBLISHED = {"ChainerMN, 128 GPUs": (128, 0.90)}


def reduction_seconds(num_ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """The model."""
    return 2 * (num_ranks - 1) * alpha + 2 * (num_ranks - 1) / num_ranks * num_bytes * beta


def fit(num_ranks: int, times: dict[int, float]) -> tuple[float, float]:
    """(alpha, beta) that leave the least relative error, none of them negative."""
    sizes, measured = np.array(list(times)), np.array(list(times.values()))
    columns = np.stack([2 * (num_ranks - 1) / measured, 2 * (num_ranks - 1) / num_ranks * sizes / measured], 1)
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    return max(float(alpha), 0.0), max(float(beta), 0.0)


def measure(comm: Any, rounds: int) -> dict[int, float]:
    """The shortest time of each size, of the slowest rank."""
    found = {}
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        best = float("inf")
        for _ in range(rounds):
            comm.Barrier()
            began = time.perf_counter()
            comm.Allreduce(x.copy(), x)
            best = min(best, comm.allreduce(time.perf_counter() - began, max_operation()))
        found[size] = best
    return found


def max_operation() -> Any:
    from mpi4py import MPI

    return MPI.MAX


def efficiency(num_ranks: int, alpha: float, bandwidth: float, overlap: float) -> float:
    """Throughput of a rank among that many, as a part of one alone."""
    took = reduction_seconds(num_ranks, GRADIENT_BYTES, alpha, 1 / bandwidth)
    return STEP_SECONDS / (STEP_SECONDS + max(took - overlap * STEP_SECONDS, 0.0))


def show_curves() -> None:
    counts = [2**k for k in range(1, 11)]
    print("efficiency       " + "".join(f"{n:>7}" for n in counts))
    for name, (alpha, bandwidth) in NETWORKS.items():
        for overlap in (0.0, OVERLAP_FRACTION):
            row = "".join(f"{efficiency(n, alpha, bandwidth, overlap):7.2f}" for n in counts)
            print(f"{name[:12]:<12} {overlap:3.0%}{row}")
    for name, (count, value) in PUBLISHED.items():
        print(f"published: {name}: {value:.0%} at {count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the file that the calls share")
    parser.add_argument("--model", action="store_true", help="print predictions beside measurements, and curves")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    if not args.model:
        from mpi4py import MPI

        times = measure(MPI.COMM_WORLD, args.rounds)
        if MPI.COMM_WORLD.rank == 0:
            stored[str(MPI.COMM_WORLD.size)] = times
            args.out.write_text(json.dumps(stored))
        return
    measured = {int(n): {int(size): t for size, t in times.items()} for n, times in stored.items()}
    alpha, beta = fit(min(measured), measured[min(measured)])
    print(f"alpha {1e6 * alpha:.1f} us, beta {1e9 * beta:.3f} ns a byte ({1e-9 / max(beta, 1e-15):.2f} GB/s)")
    for n, times in sorted(measured.items()):
        for size, seconds in times.items():
            predicted = reduction_seconds(n, size, alpha, beta)
            times_in_words = f"measured {1e6 * seconds:10.1f} us, predicted {1e6 * predicted:10.1f} us"
            print(f"{n} ranks, {size:>10,} bytes: {times_in_words}, {predicted / seconds:.2f}")
    show_curves()


if __name__ == "__main__":
    main()
