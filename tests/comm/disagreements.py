"""Random disagreements between ranks: verb, rank, argument and moment follow from a seed. None may hang.

python -m tests.comm.disagreements 200             seeds 0 to 199, each a job of 2 to 4 MPI processes, two at a time
python -m tests.comm.disagreements 200 --record    the same, and writes what came of them to benchmarks/records
python -m tests.comm.disagreements 200 --threads   on ranks that are threads
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.errors import DbrdistError
from tests.comm.training_contract import Net, batches

LIMIT_SECONDS = 20
JOBS_AT_ONCE = 2
VERBS = (
    "allreduce",
    "bcast",
    "gather",
    "allgather",
    "scatter",
    "alltoall",
    "barrier",
    "bcast_obj",
    "allgather_obj",
    "update",
)
WITH_ROOT = {"bcast", "gather", "scatter", "bcast_obj"}
WITH_ARRAY = {"allreduce", "gather", "allgather", "scatter", "alltoall"}
DEEDS = (
    "other verb",
    "skip",
    "twice",
    "shape",
    "type",
    "root",
    "bad root",
    "no array",
    "configuration",
    "finalize",
    "send",
    "receive",
    "split",
    "raise",
    "leave",
    "learning rate",
    "freeze",
    "step",
    "late",
)


class Plan:
    """What a seed says: five verbs, in one of which one rank does something else."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.num_ranks = 2 + seed % 3
        self.verbs = [rng.choice(VERBS) for _ in range(5)]
        self.deed = DEEDS[seed % len(DEEDS)]
        if self.deed in ("learning rate", "freeze", "step"):
            self.verbs[-1] = "update"
        self.moment, self.other = rng.randrange(4), rng.choice(VERBS)
        self.odd_rank = rng.randrange(self.num_ranks)
        self.seconds = rng.choice([0, 0.3, 1, 3])
        self.length = rng.choice([3, 100_000])

    def disagrees(self):
        """Whether the deed is a disagreement for the verbs from its moment on: shapes may differ in an allgather."""
        verbs = set(self.verbs[self.moment :])
        if self.deed == "late":
            return False
        if self.deed == "other verb":
            return self.other != self.verbs[self.moment]
        if self.deed in ("shape", "type"):
            return "allreduce" in verbs
        if self.deed in ("root", "bad root"):
            return bool(verbs & WITH_ROOT)
        if self.deed == "no array":  # in a bcast only the root's array counts
            return bool(verbs & WITH_ARRAY) or (self.odd_rank == 0 and "bcast" in verbs)
        return True


class Program:
    """What one rank does of a plan."""

    def __init__(self, plan, comm):
        self.plan, self.comm = plan, comm
        self.x, self.root = np.full(plan.length, comm.rank, np.float32), 0
        self.model = Net()
        self.model(*next(batches()))
        self.optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1).setup(self.model), comm)

    def all_verbs(self):
        comm = self.comm
        return {
            "allreduce": lambda: comm.allreduce(self.x),
            "bcast": lambda: comm.bcast(self.x, root=self.root),
            "gather": lambda: comm.gather(self.x, self.root),
            "allgather": lambda: comm.allgather(self.x),
            "scatter": lambda: comm.scatter([self.x] * comm.size, self.root),
            "alltoall": lambda: comm.alltoall([self.x] * comm.size),
            "barrier": comm.barrier,
            "bcast_obj": lambda: comm.bcast_obj(self.x, root=self.root),
            "allgather_obj": lambda: comm.allgather_obj(self.x),
            "update": lambda: self.optimizer.update(self.model, *next(batches())),
        }

    def run(self):
        """All verbs, with one rank's deed before, after, or in place of one."""
        for i, verb in enumerate(self.plan.verbs):
            if i == self.plan.moment and self.comm.rank == self.plan.odd_rank:
                time.sleep(self.plan.seconds)
                os.write(1, f"deed at {time.monotonic()}\n".encode())
                if self.deviate() == "skip":
                    continue
            self.all_verbs()[verb]()

    def deviate(self):
        plan, comm, deed = self.plan, self.comm, self.plan.deed
        if deed in ("other verb", "twice"):
            self.all_verbs()[plan.other if deed == "other verb" else plan.verbs[plan.moment]]()
            return "skip" if deed == "other verb" else ""
        if deed == "shape":
            self.x = np.append(self.x, 0)
        elif deed == "type":
            self.x = self.x.astype(np.float64)
        elif deed in ("root", "bad root"):
            self.root = 1 if deed == "root" else comm.size
        elif deed == "no array":
            self.x = "text"
        elif deed == "configuration":
            comm.set_config("allreduce_grad_dtype", "float16")
        elif deed == "finalize":
            comm.finalize()
        elif deed == "send":
            comm.send(np.zeros(1_000_000), (comm.rank + 1) % comm.size, 0)
        elif deed == "receive":
            comm.recv((comm.rank + 1) % comm.size, 0)
        elif deed == "split":
            comm.split(0, 0)
        elif deed == "raise":
            raise ArithmeticError("broken on purpose")
        elif deed == "leave":
            raise SystemExit(0)
        elif deed == "learning rate":
            self.optimizer.lr = 0.2
        elif deed == "freeze":
            self.model.l1.disable_update()
        elif deed == "step":
            self.optimizer.t += 1
        return "skip" if deed == "skip" else ""


def main(seed):
    """One rank of one job: prints the error that it raises, or that it came to its end, on one line."""
    program = Program(Plan(seed), create_communicator("flat"))
    try:
        program.run()
    except (DbrdistError, TypeError, ValueError) as e:
        os.write(1, f"error: {e}\n".encode())
        sys.exit(1)
    finally:
        os.write(1, b"over\n")


class Ending(NamedTuple):
    """How a job ended: what is wrong with that, its error, and the seconds from the deed to the last process's end."""

    wrong: str
    error: str
    seconds: float


def verdict(plan, code, errors):
    """What is wrong with the errors that the ranks raised; an empty text if they are as they should be."""
    if len(set(errors)) > 1:
        return f"the ranks raised different errors: {set(errors)}"
    if not plan.disagrees():
        return f"an error without a disagreement: {errors}" if code or errors else ""
    if not code or not errors:
        return f"no error, status {code}"
    odd = rf"ranks? [\d, ]*\b{plan.odd_rank}\b"
    return "" if re.search(odd, errors[0]) else f"the error does not name rank {plan.odd_rank}: {errors[0]}"


def run_job(seed, limit_seconds=LIMIT_SECONDS):
    """The ending of one job of processes."""
    from tests.comm import jobs  # here, because it needs pytest

    plan = Plan(seed)
    with tempfile.TemporaryDirectory() as folder:  # for the records of verbs that ranks leave behind
        program = ("-m", "tests.comm.disagreements", "--seed", seed)
        outcome = jobs.run(plan.num_ranks, *program, limit_seconds=limit_seconds, TMPDIR=folder)
    end = time.monotonic()
    began = [float(line.split()[-1]) for line in outcome.lines("deed at ")]
    errors = outcome.lines("error: ")
    if plan.deed == "raise":  # ends the job at once, from that rank
        errors = outcome.lines(f"[rank {plan.odd_rank}] ArithmeticError: broken on purpose")
    elif len(outcome.lines("over")) < plan.num_ranks:
        return Ending(f"a rank was ended before it had raised anything: {outcome.text}", "", 0.0)
    wrong = verdict(plan, outcome.code, errors) if len(began) == 1 else f"no deed: {outcome.text}"
    return Ending(wrong, errors[0] if errors else "", end - began[0] if began else 0.0)


def run_in_threads(seed, share=1.0):
    """The ending of ranks that are threads; the late one takes this share of the plan's time."""
    plan, errors, began = Plan(seed), [], time.monotonic()
    plan.seconds *= share
    try:
        run_threads(plan.num_ranks, lambda comm: Program(plan, comm).run(), timeout_seconds=LIMIT_SECONDS)
    except TimeoutError:
        return Ending("hung", "", LIMIT_SECONDS)
    except (Exception, SystemExit) as e:
        errors = [f"error: {e}"]
    return Ending(verdict(plan, len(errors), errors), "".join(errors), time.monotonic() - began)


def ending_of(run, seed):
    """The ending of one seed; that of a job that hung, too."""
    try:
        return run(seed)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # pytest.fail's is no Exception
        return Ending(f"hung: {e}", "", LIMIT_SECONDS)


def run_all():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seed", type=int, help="be one rank of this seed's job")
    args = parser.parse_args()
    if args.seed is not None:
        main(args.seed)
        return
    seeds = range(args.first, args.first + args.count)
    load, endings = os.getloadavg()[0], []
    with ThreadPoolExecutor(1 if args.threads else JOBS_AT_ONCE) as pool:
        run = run_in_threads if args.threads else run_job
        for seed, ending in zip(seeds, pool.map(lambda seed: ending_of(run, seed), seeds)):
            endings.append(ending)
            if ending.wrong:
                print(f"seed {seed} ({DEEDS[seed % len(DEEDS)]}): {ending.wrong}", flush=True)
    results = summary(seeds, endings)
    print({name: value for name, value in results.items() if name != "jobs"}, flush=True)
    if args.record:
        record(results, args, [load, os.getloadavg()[0]])
    sys.exit(bool(results["num_wrong"]))


def summary(seeds, endings):
    """Counts, times in seconds, and one entry for each job."""
    plans = [Plan(seed) for seed in seeds]
    jobs = [
        {
            "seed": seed,
            "num_ranks": plan.num_ranks,
            "deed": plan.deed,
            "rank": plan.odd_rank,
            "disagrees": plan.disagrees(),
            "seconds": round(ending.seconds, 2),
            "error": without_folders(ending.error),
            "wrong": without_folders(ending.wrong),
        }
        for seed, plan, ending in zip(seeds, plans, endings)
    ]
    seconds = [ending.seconds for plan, ending in zip(plans, endings) if plan.disagrees()]
    return {
        "num_jobs": len(jobs),
        "num_disagreements": len(seconds),
        "num_wrong": sum(bool(ending.wrong) for ending in endings),
        "num_hung": sum(ending.wrong.startswith("hung") for ending in endings),
        "num_over_5_seconds": sum(s > 5 for s in seconds),
        "median_seconds": round(float(np.median(seconds)), 2) if seconds else None,
        "max_seconds": round(max(seconds), 2) if seconds else None,
        "jobs": jobs,
    }


def without_folders(text):
    return re.sub(r"/\S*/", "", text)


def library():
    """Name and version of the MPI library: "MPICH Version: 5.0.2", say."""
    import mpi4py

    mpi4py.rc.initialize = False  # this process is no rank
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())


def record(results, args, load):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks"))
    import harness

    settings = {
        "ranks": "threads" if args.threads else library(),
        "seconds": "from the deed of the one rank to the end of the last process",
        "limit_seconds": LIMIT_SECONDS,
        "jobs_at_once": 1 if args.threads else JOBS_AT_ONCE,
        "load_average_before_and_after": load,
    }
    print(harness.record("random-disagreements", settings, results))


if __name__ == "__main__":
    run_all()
