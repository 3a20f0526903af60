"""Small and large verbs of two ranks on one host against MPI: a round trip, split and finalize, a model's broadcast.

The ranks have one thread each, and all candidates take turns in the same processes. A time is that of the slowest rank,
after all have met. Goals: a round trip of 24 bytes 15 us, split and finalize 1 ms each, ``bcast_data`` of 100 MB in 25
parameters 1.1 of the time in which MPI broadcasts the same arrays, whether values differ from the root's or not.

    python benchmarks/verbs.py --record
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import ranks

NUM_RANKS = 2
NUM_BYTES = 24
NUM_PARAMS, SHAPE = 25, (1000, 1000)
GOALS = {"round trip": 15e-6, "split": 1e-3, "finalize": 1e-3, "bcast_data by MPI": 1.1}
REPEATS = 100  # round trips of a sample


def pairs(comm: Any, world: Any) -> dict[str, Callable[[], None]]:
    """Rank 0 sends and receives, rank 1 answers: by dbrdist and by mpi4py."""
    sent, received = np.zeros(NUM_BYTES // 8), np.zeros(NUM_BYTES // 8)
    other = 1 - comm.rank

    def ours() -> None:
        if comm.rank == 0:
            comm.send(sent, other, 0)
            comm.recv(other, 0)
        else:
            comm.recv(other, 0)
            comm.send(sent, other, 0)

    def of_mpi() -> None:
        if comm.rank == 0:
            world.Send(sent, other)
            world.Recv(received, other)
        else:
            world.Recv(received, other)
            world.Send(sent, other)

    return {"round trip": ours, "round trip of MPI": of_mpi}


def communicators(comm: Any) -> dict[str, Callable[[], None]]:
    """One is split off, and finalized by the next call."""
    made: list[Any] = []
    return {
        "split": lambda: made.append(comm.split(0, comm.rank)),
        "finalize": lambda: made.pop().finalize(),
    }


def broadcasts(comm: Any, world: Any) -> dict[str, Callable[[], None]]:
    """All parameters of a model from rank 0; the other rank has other values, or the same already."""
    import dbrdist

    model = dbrdist.Chain()
    with model.init_scope():
        for k in range(NUM_PARAMS):
            setattr(model, f"p{k}", dbrdist.Parameter(np.zeros(SHAPE, np.float32)))
    arrays = [p.array for p in model.params()]
    rounds = iter(range(1 << 30))

    def change() -> None:
        number = next(rounds)
        for array in arrays:
            array[...] = NUM_RANKS * number + comm.rank

    def of_mpi() -> None:
        for array in arrays:
            world.Bcast(array)

    return {
        "change 1": change,
        "Bcast of MPI": of_mpi,
        "change 2": change,
        "bcast_data of other values": lambda: comm.bcast_data(model),
        "bcast_data of equal values": lambda: comm.bcast_data(model),
    }


def serve(num_rounds: int) -> None:
    from mpi4py import MPI

    import dbrdist

    comm = dbrdist.comm.create_communicator("flat")
    world = MPI.COMM_WORLD
    samples = ranks.take_turns(pairs(comm, world), num_rounds, REPEATS)
    samples |= ranks.take_turns({**communicators(comm), **broadcasts(comm, world)}, num_rounds)
    ranks.answer({name: found for name, found in samples.items() if not name.startswith("change")})


def main() -> None:
    parser = ranks.parser(__doc__.split("\n")[0], 21, {"action": "store_true"})
    args = parser.parse_args()
    if args.worker:
        serve(args.rounds)
        return
    found = ranks.run([__file__, "--worker", "--rounds", str(args.rounds)], sys.executable, NUM_RANKS)
    versions = found.pop("versions")
    results: dict[str, Any] = {name: harness.summarize(samples) for name, samples in found.items()}
    of_mpi = found["Bcast of MPI"]
    results["bcast_data by MPI"] = {
        kind: statistics.median(ours / theirs for ours, theirs in zip(found[f"bcast_data of {kind} values"], of_mpi))
        for kind in ("other", "equal")
    }
    for name, samples in found.items():
        print(f"{name:<27} {statistics.median(samples) * 1e6:10.1f} us  (least {min(samples) * 1e6:.1f})")
    print("bcast_data by MPI", {kind: round(ratio, 2) for kind, ratio in results["bcast_data by MPI"].items()})
    if args.record:
        print(harness.record("verbs", {"num_rounds": args.rounds, "goals": GOALS}, results, versions))


if __name__ == "__main__":
    main()
