"""A training step of two ranks together, against two trainings that do not know each other; PyTorch DDP beside it.

A rank is a process with one thread. On one host the figure is the throughput of the two together, as a part of that of
two independent trainings: goal 0.98, for ResNet-20 and ResNet-50. On two hosts, which are namespaces of this machine
(``two_hosts.py``: root and Linux) joined by a cable of 1 Gb/s, it is the exposed communication: what a step takes
longer than an independent one, as a part of what the reduction of its gradients takes by itself. Goal 0.25, for
ResNet-50 with 8 images per rank. All ways take turns in the same processes; a time is that of the slowest rank, after
both have met. With ``--torch-python`` the interpreter of an environment that has PyTorch, mpi4py, MPICH and what
dbrdist needs runs the ranks, and DDP over gloo takes part.

    python benchmarks/data_parallel.py --torch-python TORCH_VENV/bin/python --record
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness
import ranks
import two_hosts

SUBJECTS = {  # the model, images per rank, on how many hosts
    "resnet50 on two hosts": ("resnet50", 8, 2),
    "resnet50 on one host": ("resnet50", 8, 1),
    "resnet20 on one host": ("resnet20", 64, 1),
}
SIZES = {"resnet50": (224, 1000), "resnet20": (32, 10)}  # rows of an image, number of classes
THROUGHPUT_GOAL = 0.98
EXPOSED_GOAL = 0.25
Run = Callable[[], Any]


# ---- on each rank ----------------------------------------------------------------------------------------------------


def dbrdist_ways(model: str, batch: int, num_hosts: int) -> tuple[dict[str, Run], Any]:
    """A step alone and together, the reduction by itself, and between hosts a step that reduces after backward.

    Also the optimizer of the steps together.
    """
    import numpy as np

    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.comm import create_communicator, create_multi_node_optimizer
    from dbrdist.models import resnet

    rows, num_classes = SIZES[model]
    rng = np.random.default_rng(create_communicator("flat").rank)
    x, t = rng.standard_normal((batch, 3, rows, rows), np.float32), rng.integers(0, num_classes, batch)

    def training(comm: Any) -> tuple[Any, Any, Run]:
        net = {"resnet50": resnet.ResNet50, "resnet20": resnet.ResNet20}[model](num_classes)
        optimizer: Any = optimizers.MomentumSGD(0.001, 0.9)
        optimizer = (optimizer if comm is None else create_multi_node_optimizer(optimizer, comm)).setup(net)
        return net, optimizer, lambda: optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))

    comm = create_communicator("flat")
    net, optimizer, together = training(comm)
    ways = {"independent": training(None)[2], "together": together}
    if num_hosts > 1:
        ways["without overlap"] = training(create_communicator("flat", overlap=False))[2]
    return ways | {"reduction": lambda: comm.multi_node_mean_grad(net)}, optimizer


def torch_ways(model: str, batch: int) -> dict[str, Run]:
    """The same with PyTorch: alone, with DDP over gloo, and the reduction of as many gradients."""
    import torch
    import torch.distributed as dist
    import torch_resnet
    from torch.nn.parallel import DistributedDataParallel

    ranks.start_gloo()
    rows, num_classes = SIZES[model]
    x = torch.randn(batch, 3, rows, rows).contiguous(memory_format=torch.channels_last)
    t = torch.randint(0, num_classes, (batch,))

    def training(wrap: Callable[[Any], Any]) -> Run:
        net = {"resnet50": torch_resnet.resnet50, "resnet20": torch_resnet.resnet20}[model](num_classes)
        net = wrap(net.to(memory_format=torch.channels_last))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

        def step() -> None:
            loss = torch.nn.functional.cross_entropy(net(x), t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    size = sum(p.numel() for p in torch_resnet.__dict__[model](num_classes).parameters())
    grads = torch.zeros(size)
    return {
        "torch independent": training(lambda net: net),
        "torch DDP": training(DistributedDataParallel),
        "gloo reduction": lambda: dist.all_reduce(grads),
    }


def serve(subject: str, num_rounds: int, peers: bool) -> None:
    """Time all ways in turn."""
    model, batch, num_hosts = SUBJECTS[subject]
    runs, optimizer = dbrdist_ways(model, batch, num_hosts)
    samples = ranks.take_turns(runs | (torch_ways(model, batch) if peers else {}), num_rounds)
    ranks.answer({"samples": samples, "waited_seconds": optimizer.exposed_seconds / optimizer.t})


# ---- the program -----------------------------------------------------------------------------------------------------


def figures(samples: dict[str, list[float]], num_hosts: int) -> dict[str, Any]:
    """For each pair of ways: throughput as a part of independent trainings', and between hosts what is exposed."""
    found: dict[str, Any] = {}
    pairs = [("together", "independent", "reduction"), ("without overlap", "independent", "reduction"),
             ("torch DDP", "torch independent", "gloo reduction")]  # fmt: skip
    for together, alone, reduction in pairs:
        if together in samples:
            longer = statistics.median(a - b for a, b in zip(samples[together], samples[alone]))
            found[together] = {
                "throughput": statistics.median(b / a for a, b in zip(samples[together], samples[alone]))
            }
            if num_hosts > 1:
                found[together] |= {
                    "exposed_seconds": longer, "exposed": longer / statistics.median(samples[reduction])
                }  # fmt: skip
    return found


def show(subject: str, results: dict[str, Any]) -> None:
    for name, r in results["ways"].items():
        print(f"{subject}: {name:<18} {r['median_seconds'] * 1e3:9.1f} ms  ({r['min_seconds'] * 1e3:.1f} to "
              f"{r['max_seconds'] * 1e3:.1f})")  # fmt: skip
    waited = results["figures"]["together"]["waited_seconds"]
    print(f"{subject}: together: of that {waited * 1e3:.1f} ms a step after backward, in reductions and for the other")
    for name, f in results["figures"].items():
        print(f"{subject}: {name}: throughput {f['throughput']:.3f} of independent trainings"
              + (f", exposed {f['exposed_seconds'] * 1e3:.0f} ms, {f['exposed']:.3f} of the reduction"
                 if "exposed" in f else ""))  # fmt: skip


def main() -> None:
    parser = ranks.parser(__doc__.split("\n")[0], 9, {"choices": SUBJECTS})
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="these subjects; default all")
    parser.add_argument("--rate", default="1gbit", help="of the cable between two hosts, as tc writes it")
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.rounds, args.peers)
        return
    results: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for subject in args.only or SUBJECTS:
        num_hosts = SUBJECTS[subject][2]
        with two_hosts.TwoHosts(args.rate) if num_hosts == 2 else contextlib.nullcontext() as hosts:
            words = [__file__, "--worker", subject, "--rounds", str(args.rounds)]
            python = args.torch_python or sys.executable
            found = ranks.run([*words, *["--peers"] * bool(args.torch_python)], python, 2, hosts)
        about = found["versions"]
        ways = {name: harness.summarize(samples) for name, samples in found["samples"].items()}
        results[subject] = {"ways": ways, "figures": figures(found["samples"], num_hosts)}
        results[subject]["figures"]["together"]["waited_seconds"] = found["waited_seconds"]
        show(subject, results[subject])
    print(f"goals: throughput {THROUGHPUT_GOAL} on one host, exposed {EXPOSED_GOAL} on two")
    if args.record:
        settings = {
            "num_ranks": 2, "num_threads": 1, "num_rounds": args.rounds, "rate": args.rate,
            "throughput_goal": THROUGHPUT_GOAL, "exposed_goal": EXPOSED_GOAL,
        }  # fmt: skip
        print(harness.record("data-parallel", settings, results, about))


if __name__ == "__main__":
    main()
