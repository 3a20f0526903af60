"""Passes over flat memory on one GPU: optimizer updates, and the copies of a reduction that goes by way of the host.

GB/s count what an update has to move: each array that it reads and each that it writes, once. For copies they count the
array's size. The memory of ResNet-50: 25.6 million parameters.

    python benchmarks/gpu/memory.py --record
    python benchmarks/gpu/memory.py --on numpy
"""

from __future__ import annotations

import statistics
from typing import Any

import device
import harness

NUM_PARAMETERS = 160  # arrays, as many as ResNet-50 has
METHODS = {"SGD": 3, "MomentumSGD": 5, "Adam": 7, "LARS": 7}  # passes: read p, g and state; write p and state


def update_case(method: str, num_elements: int, on: str) -> device.Timed:
    """One update from gradients that are there."""
    import numpy as np

    import dbrdist
    from dbrdist import Parameter, optimizers

    place = device.of(on)
    net = dbrdist.Link()
    with net.init_scope():
        for i in range(NUM_PARAMETERS):
            value = np.full((num_elements // NUM_PARAMETERS // 4, 4), 0.01, np.float32)
            setattr(net, f"p{i}", Parameter(value))
    net.to_device(place)
    optimizer = getattr(optimizers, method)().setup(net)
    for p in net.params():
        p.grad = place.xp.full(p.shape, 0.001, np.float32)
    optimizer.update()
    return device.Timed(optimizer.update, clock(on))


def copy_case(direction: str, num_elements: int, on: str) -> device.Timed:
    """An array to the host ('down'), back ('up'), both within an allreduce, or down into pinned memory."""
    import numpy as np

    import dbrdist
    from dbrdist.comm import create_communicator

    place = device.of(on)
    there = place.xp.ones(num_elements, np.float32)
    here = np.ones(num_elements, np.float32)
    if direction == "pinned":
        import cupyx

        pinned = cupyx.empty_pinned(num_elements, np.float32)
        return device.Timed(lambda: there.get(out=pinned), clock(on))
    host, comm = dbrdist.get_device("@numpy"), create_communicator("single")
    steps = {
        "down": lambda: host.send(there),
        "up": lambda: place.send(here),
        "allreduce": lambda: comm.allreduce(there),
    }
    return device.Timed(steps[direction], clock(on))


def clock(on: str) -> Any:
    """The clock of what the benchmark runs on."""
    return device.Host() if on == "numpy" else device.Cuda()


def measure(case: device.Timed, num_bytes: int, args: Any) -> dict[str, Any]:
    """Times and bandwidth of a case."""
    result = harness.summarize([case.sample(args.seconds, 3) for _ in range(args.rounds)])
    result["num_bytes"] = num_bytes
    result["gb_per_second"] = num_bytes / result["median_seconds"] / 1e9
    result["gb_per_second_spread"] = statistics.pstdev(num_bytes / s / 1e9 for s in result["samples"])
    return result


def main() -> None:
    parser = device.arguments(__doc__ or "")
    parser.add_argument("--elements", type=int, help="default: 25.6 million; 64 thousand with --on numpy")
    args = parser.parse_args()
    device.require(args.on)
    n = args.elements or (64_000 if args.on == "numpy" else 25_600_000)
    results = {}
    for method, num_passes in METHODS.items():
        results[f"update {method}"] = measure(update_case(method, n, args.on), 4 * n * num_passes, args)
    for direction in ("down", "up", "allreduce", *(["pinned"] if args.on == "cupy" else [])):
        results[f"copy {direction}"] = measure(copy_case(direction, n, args.on), 4 * n, args)
    for name, r in results.items():
        print(f"{name:<20} {r['median_seconds'] * 1e3:10.3f} ms  ({r['min_seconds'] * 1e3:.3f} to "
              f"{r['max_seconds'] * 1e3:.3f}), {r['gb_per_second']:8.1f} GB/s")  # fmt: skip
    if args.record:
        settings = {"num_elements": n, "num_parameters": NUM_PARAMETERS, "dtype": "float32", "num_rounds": args.rounds}
        print(harness.record("gpu-memory", settings, results, device.about(args.on)))


if __name__ == "__main__":
    main()
