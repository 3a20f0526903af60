"""One table of all ways to add gradients: each communicator over MPI, MPI_Allreduce, gloo; on one host and on two.

The gradients of two models, 102 MB in 160 parameters and 10 KB in 10, on 2 to 4 ranks with one thread each. The second
host is a namespace on this machine (``two_hosts.py``: root and Linux), reached over a cable as fast as memory. All ways
take turns in the same processes; a time is that of the slowest rank, after all have met. With ``--torch-python`` the
interpreter of an environment that has PyTorch, mpi4py and what dbrdist needs runs the ranks, and gloo takes part. Goal:
what ``auto`` takes is within a tenth of the fastest communicator in every row.

    python benchmarks/reduction_table.py --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import harness
import ranks
import two_hosts

SIZES = {"102 MB": (160, 160_000, 1), "10 KB": (10, 256, 100)}  # parameters, elements of each, reductions in a sample
COMMUNICATORS = ("flat", "naive", "hierarchical", "two_dimensional", "non_cuda_aware", "single_node", "dummy")
NOT_COMPARED = ("single_node", "dummy")  # flat by another name; nothing is added
OTHERS = ("MPI_Allreduce", "gloo")
PLACES = {"one host": 1, "two hosts": 2}
COUNTS = (2, 3, 4)
GOAL = 1.1
Run = Callable[[], Any]


# ---- on each rank ----------------------------------------------------------------------------------------------------


def ways(label: str, num_hosts: int, peers: bool) -> dict[str, Run]:
    """What is timed for one size of model."""
    import numpy as np
    from mpi4py import MPI

    from dbrdist.comm import create_communicator

    num_params, size, _ = SIZES[label]
    grads = model(num_params, size)
    names = [name for name in COMMUNICATORS if num_hosts == 1 or name != "single_node"]
    found: dict[str, Run] = {}
    for name in names:
        comm = create_communicator(name)
        found[name] = lambda comm=comm: comm.multi_node_mean_grad(grads)
    x = np.zeros(num_params * size, np.float32)
    found["MPI_Allreduce"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
    return found | ({"gloo": gloo(num_params * size)} if peers else {})


def model(num_params: int, size: int) -> Any:
    """A link with that many parameters, and gradients."""
    import numpy as np

    from dbrdist.core.model.link import Link
    from dbrdist.core.model.parameter import Parameter

    made = Link()
    with made.init_scope():
        for k in range(num_params):
            setattr(made, f"p{k}", Parameter(np.zeros(size, np.float32)))
    for p in made.params():
        p.grad = np.ones(size, np.float32)
    return made


def gloo(size: int) -> Run:
    """PyTorch's allreduce over gloo."""
    import torch
    import torch.distributed as dist

    ranks.start_gloo()
    x = torch.zeros(size)
    return lambda: dist.all_reduce(x)


def serve(num_hosts: int, num_rounds: int, peers: bool) -> None:
    """Time all ways in turn."""
    from dbrdist.comm import create_communicator
    from dbrdist.comm.communicators.create import OVER_MPI

    chosen = type(create_communicator())
    samples = {
        label: ranks.take_turns(ways(label, num_hosts, peers), num_rounds, repeats)
        for label, (_, _, repeats) in SIZES.items()
    }
    ranks.answer({"samples": samples, "auto": next(name for name, kind in OVER_MPI.items() if kind is chosen)})


# ---- the program -----------------------------------------------------------------------------------------------------


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """The times of each size, and what ``auto`` takes as a part of the fastest communicator."""
    results: dict[str, Any] = {}
    for label, samples in found["samples"].items():
        times = {name: harness.summarize(seconds) for name, seconds in samples.items()}
        medians = {name: t["median_seconds"] for name, t in times.items()}
        fastest = min((n for n in medians if n not in (*NOT_COMPARED, *OTHERS)), key=medians.__getitem__)
        ratios = {name: medians[found["auto"]] / medians[name] for name in (fastest, *OTHERS) if name in medians}
        results[label] = {
            "ways": times, "auto": found["auto"], "fastest": fastest, "auto_to": ratios, "goal": GOAL
        }  # fmt: skip
    return results


def print_table(label: str, results: dict[str, Any]) -> None:
    """Milliseconds of one reduction in Markdown, a row for each way; and whether ``auto`` is right in each column."""
    columns = {name: r[label] for name, r in results.items()}
    print(f"\n| {label}, ms | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for way in (*COMMUNICATORS, *OTHERS):
        cells = [r["ways"][way]["median_seconds"] * 1e3 if way in r["ways"] else None for r in columns.values()]
        if any(cells):
            print(f"| `{way}` | " + " | ".join("-" if c is None else f"{c:.3f}" for c in cells) + " |")
    for name, r in columns.items():
        ratio = r["auto_to"][r["fastest"]]
        beside = ", ".join(f"{r['auto_to'][n]:.2f} of {n}" for n in OTHERS if n in r["auto_to"])
        verdict = "met" if ratio <= GOAL else "MISSED"
        print(
            f"{label}, {name}: auto takes {r['auto']}, {ratio:.2f} of the fastest ({r['fastest']}), {verdict}; {beside}"
        )


def main() -> None:
    parser = ranks.parser(__doc__.split("\n")[0], 7, {"type": int, "choices": PLACES.values()})
    parser.add_argument(
        "--ranks", type=int, choices=COUNTS, action="append", help="these numbers of ranks; default all"
    )
    parser.add_argument("--hosts", choices=PLACES, action="append", help="these places; default both")
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.rounds, args.peers)
        return
    results: dict[str, Any] = {}
    about: dict[str, Any] = {}
    python = args.torch_python or sys.executable
    for place in args.hosts or PLACES:
        with two_hosts.TwoHosts() if PLACES[place] == 2 else contextlib.nullcontext() as hosts:
            for count in args.ranks or COUNTS:
                words = [__file__, "--worker", str(PLACES[place]), "--rounds", str(args.rounds)]
                found = ranks.run([*words, *["--peers"] * bool(args.torch_python)], python, count, hosts)
                about = found["versions"]
                results[f"{place}, {count} ranks"] = judged(found)
    for label in SIZES:
        print_table(label, results)
    if args.record:
        print(harness.record("reduction-table", {"num_rounds": args.rounds, "num_threads": 1}, results, about))


if __name__ == "__main__":
    main()
