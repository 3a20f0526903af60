"""What compressed gradients save on a slow cable: bytes on the wire and seconds of a reduction, plain to top-k.

Two ranks with one thread each on two hosts, which are namespaces of this machine (``two_hosts.py``: root and Linux),
joined by a cable of 1 Gb/s or 100 Mb/s. The gradients are those of ResNet-50, 102 MB of float32, normally distributed.
Bytes are what the first host sends in one reduction, headers included, as its network interface counts them. A time is
that of the slower rank for a multi-node step without forward and backward; ``update`` is what the optimizer takes of it
by itself.

    python benchmarks/wire.py --record
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import harness
import ranks
import two_hosts

RATES = ("1gbit", "100mbit")
WAYS = ("update", "plain", "float16", "bfloat16", "PowerSGD rank 2", "PowerSGD rank 4", "top 1 %", "top 0.1 %")


# ---- on each rank ----------------------------------------------------------------------------------------------------


def optimizer_of(way: str) -> Any:
    """An optimizer of ResNet-50 whose gradients lie there, and how often it may be called."""
    import numpy as np

    from dbrdist import optimizers
    from dbrdist.comm import create_communicator, create_multi_node_optimizer
    from dbrdist.comm.gradients.compression import PowerSGD, TopK
    from dbrdist.models.resnet import ResNet50

    compression: dict[str, Any] = {
        "PowerSGD rank 2": PowerSGD(2), "PowerSGD rank 4": PowerSGD(4), "top 1 %": TopK(0.01), "top 0.1 %": TopK(0.001)
    }  # fmt: skip
    dtype = way if way in ("float16", "bfloat16") else None
    comm = create_communicator("dummy" if way == "update" else "flat", allreduce_grad_dtype=dtype)
    net = ResNet50(1000)
    net(np.zeros((2, 3, 32, 32), np.float32))  # layers learn their sizes
    made = create_multi_node_optimizer(optimizers.SGD(0.0), comm, compression=compression.get(way)).setup(net)
    rng = np.random.default_rng(comm.rank)
    for p in net.params():
        p.grad = rng.standard_normal(p.shape, np.float32)
    return made


def serve(num_rounds: int) -> None:
    """Time one way after the other."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, list[int]] = {way: [] for way in WAYS}
    for way in WAYS:
        optimizer = optimizer_of(way)
        for number in range(num_rounds + 1):  # one to warm up
            world.Barrier()
            before, start = two_hosts.sent_bytes(), time.perf_counter()
            optimizer.update()
            took = world.allreduce(time.perf_counter() - start, MPI.MAX)
            if number > 0:
                seconds[way].append(took)
                sent[way].append(two_hosts.sent_bytes() - before)
        optimizer.communicator.finalize()
    ranks.answer({"seconds": seconds, "sent": sent})


# ---- the program -----------------------------------------------------------------------------------------------------


def judged(found: dict[str, Any], rate: str) -> dict[str, Any]:
    """Bytes and seconds of each way, and as parts of plain."""
    results: dict[str, Any] = {}
    plain_bytes, plain_seconds = (statistics.median(found[kind]["plain"]) for kind in ("sent", "seconds"))
    for way in WAYS:
        times, sent = found["seconds"][way], found["sent"][way]
        results[way] = {
            **harness.summarize(times),
            "sent_bytes": statistics.median(sent),
            "bytes_of_plain": statistics.median(sent) / plain_bytes,
            "time_of_plain": statistics.median(times) / plain_seconds,
        }
        r = results[way]
        print(f"{rate:<8} {way:<16} {r['sent_bytes']:>13,.0f} bytes ({r['bytes_of_plain']:.4f} of plain), "
              f"{r['median_seconds']:7.3f} s ({r['time_of_plain']:.3f} of plain)")  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", action="append", help="of the cable, as tc writes it; default 1gbit and 100mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.rounds)
        return
    results: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for rate in args.rate or RATES:
        with two_hosts.TwoHosts(rate) as hosts:
            words = [__file__, "--worker", "--rounds", str(args.rounds)]
            found = ranks.run(words, sys.executable, 2, hosts)
        about = found["versions"]
        results[rate] = judged(found, rate)
    if args.record:
        print(harness.record("wire", {"num_ranks": 2, "num_threads": 1, "num_rounds": args.rounds}, results, about))


if __name__ == "__main__":
    main()
