"""Jobs of 1,024 and 4,096 simulated ranks in one process: what agreement, the deadlock judge and snapshots cost.

The code of every rank is dbrdist's own: the header of a step with the gate and the reduction of rows, the watch with
its channel, the judge, the state that a snapshot gathers; and that of dbrdist-launch, in ``launched.py``. MPI,
processes and the clock are simulated, so that pauses take no time. Costs are CPU seconds of rank 0, of a rank or of the
launcher, and numbers of messages and bytes.

    python benchmarks/cluster/simulator.py --ranks 1024 4096 --record
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from cluster import launched  # noqa: E402
from cluster.clock import Clock  # noqa: E402
from cluster.fabric import MODULE, Comm, Group, Mirror  # noqa: E402

from dbrdist import links as L  # noqa: E402
from dbrdist import models, optimizers  # noqa: E402
from dbrdist.comm.communicators import mpi_communicator, shared_memory  # noqa: E402
from dbrdist.comm.failure import channel, judge, watch  # noqa: E402
from dbrdist.comm.protocol import gate  # noqa: E402
from dbrdist.comm.protocol.group import StopRequests  # noqa: E402
from dbrdist.comm.protocol.primitives import Ranks  # noqa: E402
from dbrdist.comm.run.snapshots import LocalState  # noqa: E402
from dbrdist.comm.steps.header import Steps  # noqa: E402
from dbrdist.comm.transport import call_log, mpi  # noqa: E402
from dbrdist.comm.transport.row_reduction import RowReduction  # noqa: E402

STEPS_PER_SECOND = 5
LOOK = watch._LOOK_SECONDS
REAL_TIME = time
_NOBODY = 1 << 62  # a thread that does not exist: a simulated rank computes nothing


class SimulatedRanks(Ranks):
    """What carries rows between simulated ranks; they move no bytes."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self.size = rank, job.size
        self.reduction = RowReduction(MODULE, Comm(job.rows, rank), Comm(job.differing, rank), self.wait)

    def wait(self, call: Any, request: Any, kind: str) -> None:
        """All is there, or the simulation is wrong."""
        assert request.Test(), f"rank {self.rank} would wait for ever"

    def post_row(self, call: Any, row: bytes, enclosed: Any = ()) -> Any:
        return self.reduction.post(row)

    def bcast_bytes(self, *args: Any) -> None:
        raise NotImplementedError("simulated ranks move no bytes")

    allgather_bytes = exchange_bytes = send_parts = recv_parts = bcast_bytes  # type: ignore[assignment]


class Rank:
    """One rank: its gate, its rows, its optimizer, and its watch."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self.size = rank, job.size
        self.record = call_log.CallLog(rank, _NOBODY)
        self.stop = StopRequests()
        self.reducer = SimpleNamespace(encloses=lambda arrays: False, plans={})
        self.ranks = SimulatedRanks(job, rank)
        self.reduction = self.ranks.reduction
        self.gate = gate.Gate(self.ranks, self.record, "world", job.members)
        self.optimizer = optimizers.MomentumSGD(0.1, 0.9).setup(L.Linear(2, 2))
        self.steps = Steps(self, self.optimizer)
        self.watch = watch._Watch()
        self.watch.joined = True
        self.call: Any = None

    # ---- what it does ----

    def post(self, num_samples: int) -> None:
        """Show the header of a step."""
        self.steps.post(num_samples, 1, False)

    def finish(self) -> Any:
        """Wait for the headers of all, and make the step without gradients."""
        with self.steps.meet() as call:
            header = self.steps.wait(call)
            header.weights()
        self.optimizer.t += 1
        return header

    def begin_wait(self, number: int, now: float, verb: str = "barrier") -> None:
        """From now on it waits in a verb."""
        call = call_log.Call(self.record, verb, "world", self.gate.members, ("train.py", 10))
        call.since, call.is_waiting, call.number, call.thread = now, True, number, _NOBODY
        self.record.num_entered += 1
        call.wait_id = self.record.num_entered
        self.record._counts["world",] = number
        self.record.running[_NOBODY] = call
        self.record.threads.clear()  # this process's own, which computes for all
        self.call = call

    def end_wait(self) -> None:
        """It goes on."""
        self.record.running.clear()
        self.call = None


class Job:
    """All ranks, and what they share."""

    def __init__(self, size: int) -> None:
        self.size, self.clock = size, Clock()
        self.members = tuple(range(size))
        self.rows, self.differing, self.watching = Group(size), Group(size), Group(size)
        self.ranks = [Rank(self, rank) for rank in range(size)]
        with mock.patch.object(mpi, "start", lambda: MODULE):
            for rank in self.ranks:
                one = channel.FailureChannel(Comm(self.watching, rank.rank), self.members)
                rank.watch.channels = [one]
        self.channels = self.ranks[0].watch.channels[0]._comm.group
        self.ranks[0].watch.judges = {0: judge.DeadlockJudge(self.ranks[0].watch.channels[0])}
        self.ended: list[int] = []

    @contextlib.contextmanager
    def as_rank(self, rank: Rank) -> Iterator[None]:
        """Within the block, this process is one rank."""
        watch._watch, call_log.process = rank.watch, rank.record
        mpi.world = lambda: (rank.rank, self.size)
        yield

    def look(self, ranks: Any = None) -> float:
        """One turn of every watch; the CPU seconds that rank 0 needs for its own."""
        own = 0.0
        for rank in self.ranks if ranks is None else ranks:
            with self.as_rank(rank):
                began = REAL_TIME.thread_time()
                watch._look()
                if rank.rank == 0:
                    own = REAL_TIME.thread_time() - began
        return own

    def run(self, seconds: float, everyone: bool = True) -> float:
        """So many simulated seconds of watching; the CPU seconds of rank 0. Without ``everyone`` it alone looks."""
        total = 0.0
        for _ in range(round(seconds / LOOK)):
            self.clock.now += LOOK
            total += self.look(None if everyone else self.ranks[:1])
        return total


@contextlib.contextmanager
def simulated(size: int) -> Iterator[Job]:
    """A job whose clock is simulated."""
    job = Job(size)
    saved = watch._watch, call_log.process
    clock = SimpleNamespace(
        monotonic=job.clock.monotonic, sleep=job.clock.sleep, perf_counter=job.clock.perf_counter, time=job.clock.time
    )
    places = [mock.patch.object(module, "time", clock) for module in (watch, judge, call_log, gate)]
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(place)
        stack.enter_context(mock.patch.object(mpi, "started", lambda: MODULE))
        stack.enter_context(mock.patch.object(mpi, "world", lambda: (0, size)))
        stack.enter_context(mock.patch.object(mpi, "end_job", job.ended.append))
        stack.enter_context(mock.patch.object(watch, "report_line", lambda rank, text: None))
        stack.enter_context(mock.patch.object(watch, "say_record", lambda: None))
        try:
            yield job
        finally:
            watch._watch, call_log.process = saved


# ---- what is measured ----


def steps(job: Job, num_steps: int, differs: bool) -> dict[str, float]:
    """The header of a step: with equal numbers of examples, or with one rank that has fewer."""
    seconds, before = [], job.rows.num_bytes[0] + job.differing.num_bytes[0]
    for _ in range(num_steps):
        own = 0.0
        for rank in job.ranks:
            began = time.thread_time()
            rank.post(3 if differs and rank.rank == job.size - 1 else 4)
            own += time.thread_time() - began if rank.rank == 0 else 0.0
        for rank in job.ranks:
            rank.reduction.settle()
        for rank in job.ranks:
            if rank.rank not in (0, 1, job.size - 1):  # of all others it would be the same
                rank.optimizer.t += 1
                continue
            began = time.thread_time()
            rank.finish()
            own += time.thread_time() - began if rank.rank == 0 else 0.0
        seconds.append(own)
    sent = job.rows.num_bytes[0] + job.differing.num_bytes[0] - before
    return {"cpu_seconds_of_rank_0": float(np.median(seconds)), "bytes_sent_by_a_rank": sent / num_steps}


def pauses(job: Job, num_pauses: int = 3) -> dict[str, float]:
    """All ranks wait 4 s for rank 0, several times: what rank 0 pays for it, and what is left of it afterwards."""
    before = job.run(5, everyone=False) / 5
    during, messages = [], sum(job.channels.num_messages.values())
    for number in range(1, num_pauses + 1):
        for rank in job.ranks[1:]:
            rank.begin_wait(number, job.clock.now)
        job.ranks[0].record.home = threading.get_ident()  # which computes
        job.ranks[0].record._counts["world",] = number - 1
        spent = job.run(4)
        for rank in job.ranks[1:]:
            rank.end_wait()
        during.append(spent + job.run(1))
    messages = sum(job.channels.num_messages.values()) - messages
    assert messages >= num_pauses * (job.size - 1), "nobody says that it waits"
    after = job.run(5, everyone=False) / 5
    assert not job.ranks[0].watch.judges[0]._states, "the judge keeps waits that are over"
    return {
        "cpu_seconds_of_rank_0_per_pause": float(np.median(during)),
        "messages_per_rank_and_pause": messages / num_pauses / job.size,
        "cpu_seconds_of_rank_0_per_second_before": before,
        "cpu_seconds_of_rank_0_per_second_after": after,
    }


def death(job: Job) -> dict[str, float]:
    """One rank has left while all others wait: how long until every rank has the verdict."""
    left = job.ranks[7]
    left.watch.has_left = True
    left.record._counts["world",] = 99
    with job.as_rank(left):
        state = watch._state(keys=())
        left.watch.channels[0].tell(0, {"what": "state", **state.encode()})
    waiting = [rank for rank in job.ranks if rank is not left]
    job.ranks[0].record.home = _NOBODY
    for rank in waiting:
        rank.begin_wait(100, job.clock.now)
    began, spent = job.clock.now, 0.0
    while not all(rank.call.error for rank in waiting):
        spent += job.run(LOOK)
        assert job.clock.now - began < 30, "no verdict"
    texts = {rank.call.error for rank in waiting}
    assert len(texts) == 1 and "rank 7 has left" in texts.pop()
    for rank in waiting:
        rank.end_wait()
        rank.watch.told_at = 0.0
    return {"seconds_until_all_know": job.clock.now - began, "cpu_seconds_of_rank_0": spent}


def exits(job: Job) -> dict[str, float]:
    """All ranks but the first are at their exit: how many messages, and to how many ranks each speaks."""
    for rank in job.ranks:
        rank.watch.has_left = False
    messages = sum(job.channels.num_messages.values())
    partners = [len(found) for found in job.channels.partners]
    for rank in job.ranks[1:]:
        with job.as_rank(rank), mock.patch.object(watch, "all_leave_within", lambda seconds: seconds == float("inf")):
            watch._leave()
    job.look(job.ranks[:1])
    more = [len(found) - before for found, before in zip(job.channels.partners, partners)]
    return {
        "messages": sum(job.channels.num_messages.values()) - messages,
        "most_new_partners_of_a_rank": max(more[1:]),
    }


def snapshot(size: int, model: Any) -> dict[str, float]:
    """What the ranks' statistics add to a snapshot of a model and its momentum."""
    comm = SimpleNamespace(
        rank=0, size=size, gather_obj=lambda mine: [mine] * size, allreduce=lambda x: x * np.float64(size)
    )
    from dbrdist.core.files.serializer import DictionarySerializer

    local = LocalState(comm, model, SimpleNamespace(skipped=[]))
    began = time.thread_time()
    local.gather()
    found = DictionarySerializer()
    local.serialize(found)
    seconds = time.thread_time() - began
    added = sum(np.asarray(value).nbytes for value in found.target.values())
    state = 2 * sum(p.array.nbytes for p in model.params())
    return {
        "entries": len(found.target), "bytes": added, "times_model_and_momentum": (state + added) / state,
        "cpu_seconds": seconds,
    }  # fmt: skip


def start(size: int, per_host: int) -> dict[str, float]:
    """What creating a communicator costs a rank of ``per_host`` on its host."""
    world = Mirror(size, per_host)
    module = SimpleNamespace(**vars(MODULE), COMM_WORLD=world, COMM_TYPE_SHARED=0, UNDEFINED=-1, COMM_NULL=None)
    saved = call_log.process
    call_log.process = call_log.CallLog(0, _NOBODY)
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("start", lambda: module), ("started", lambda: module),
            ("world_ranks", lambda mpi_comm: tuple(range(mpi_comm.size))),
            ("refusal", lambda: ""), ("unlink_segments", lambda: None), ("watching_is_allowed", lambda: True),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(mpi, name, value))
        stack.enter_context(mock.patch.object(mpi_communicator.environment, "refusal", lambda size: ""))
        began = time.thread_time()
        comm = shared_memory.FlatCommunicator()
        seconds = time.thread_time() - began
    call_log.process = saved
    assert (comm.size, comm.intra_size, comm.inter_size) == (size, per_host, size // per_host)
    return {"cpu_seconds_of_a_rank": seconds}


def simulate(size: int, num_steps: int = 5, model: Any = None) -> dict[str, dict[str, float]]:
    """All of it."""
    with simulated(size) as job:
        found = {"step": steps(job, num_steps, False), "uneven step": steps(job, num_steps, True)}
        found |= {"pauses": pauses(job), "death": death(job), "exit": exits(job)}
    if model is not None:
        found["snapshot"] = snapshot(size, model)
    found["start"] = start(size, 8)
    found |= launched.simulate(size)
    of_judge = found["pauses"]["cpu_seconds_of_rank_0_per_second_after"]
    found["rank 0"] = {"share_of_a_core": STEPS_PER_SECOND * found["step"]["cpu_seconds_of_rank_0"] + of_judge}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/cluster-DATE.json")
    args = parser.parse_args()
    model = models.ResNet50(1000)
    results = {}
    for size in args.ranks:
        results[str(size)] = simulate(size, model=model)
        for name, numbers in results[str(size)].items():
            print(size, name, ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()), flush=True)
    if args.record:
        import harness

        harness.record("cluster", {"ranks": args.ranks, "steps per second": STEPS_PER_SECOND}, results)


if __name__ == "__main__":
    main()
