"""Random disagreements between ranks: verb, rank, argument and moment follow from a seed. None may hang.

python -m tests.comm.disagreements 200             seeds 0 to 199, each a job of 2 to 4 MPI processes
python -m tests.comm.disagreements 200 --threads   on ranks that are threads
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.errors import DbrdistError
from tests.comm.training_contract import Net, batches

LIMIT_SECONDS = 45
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


class Program:
    """What one rank does: five verbs, in one of which one rank does something else."""

    def __init__(self, seed, comm):
        rng = random.Random(seed)
        self.comm = comm
        self.verbs = [rng.choice(list(self.all_verbs())) for _ in range(5)]
        self.deed = DEEDS[seed % len(DEEDS)]
        if self.deed in ("learning rate", "freeze", "step"):
            self.verbs[-1] = "update"
        self.moment, self.other = rng.randrange(4), rng.choice(list(self.all_verbs()))
        self.is_odd = comm.rank == rng.randrange(comm.size)
        self.seconds = rng.choice([0, 0.3, 1, 3])
        self.x, self.root = np.full(rng.choice([3, 100_000]), comm.rank, np.float32), 0
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
        for i, verb in enumerate(self.verbs):
            if i == self.moment and self.is_odd:
                time.sleep(self.seconds)
                if self.deviate() == "skip":
                    continue
            self.all_verbs()[verb]()

    def deviate(self):
        comm, deed = self.comm, self.deed
        if deed in ("other verb", "twice"):
            self.all_verbs()[self.other if deed == "other verb" else self.verbs[self.moment]]()
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
    """One rank of one job: prints the error that it raises, on one line."""
    program = Program(seed, create_communicator("flat"))
    try:
        program.run()
    except (DbrdistError, TypeError, ValueError) as e:
        os.write(1, f"error: {e}\n".encode())
        sys.exit(1)


def verdict(seed, code, text):
    """What is wrong with how a job ended; an empty text if it is as it should be."""
    deed = DEEDS[seed % len(DEEDS)]
    errors = {line for line in text.splitlines() if line.startswith("error: ")}
    if len(errors) > 1:
        return f"the ranks raised different errors: {errors}"
    if deed == "late" and (code or errors):
        return "ranks that only were late were ended"
    if deed in ("configuration", "no array", "raise", "bad root", "learning rate", "freeze", "step") and not code:
        if deed in ("no array", "bad root") and not errors:
            return ""  # the verbs after it had none
        return f"no error after the deed {deed!r}"
    return ""


def run_job(seed):
    """(what is wrong, seconds) of one job of processes."""
    from tests.comm import jobs  # here, because it needs pytest

    outcome = jobs.run(2 + seed % 3, "-m", "tests.comm.disagreements", "--seed", seed, limit_seconds=LIMIT_SECONDS)
    return verdict(seed, outcome.code, outcome.text), outcome.seconds


def run_in_threads(seed):
    """(what is wrong, seconds) of ranks that are threads."""
    began = time.monotonic()
    code, text = 0, ""
    try:
        run_threads(2 + seed % 3, lambda comm: Program(seed, comm).run(), timeout_seconds=LIMIT_SECONDS)
    except TimeoutError:
        return "hung", time.monotonic() - began
    except (Exception, SystemExit) as e:
        code, text = 1, f"error: {e}"
    return verdict(seed, code, text), time.monotonic() - began


def run_all():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        main(args.seed)
        return
    bad, longest = [], 0.0
    for seed in range(args.first, args.first + args.count):
        try:
            wrong, seconds = (run_in_threads if args.threads else run_job)(seed)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            wrong, seconds = f"hung: {e}", LIMIT_SECONDS
        longest = max(longest, seconds)
        if wrong:
            bad.append(seed)
            print(f"seed {seed} ({DEEDS[seed % len(DEEDS)]}): {wrong}", flush=True)
    print(f"{args.count} disagreements, {len(bad)} wrong, the longest took {longest:.1f} s", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    run_all()
