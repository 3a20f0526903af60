"""Random jobs on real ranks, whose results are known from one process, and planted disagreements, which all must raise.

    python -m tests.fuzz.ranks --jobs 1000 --seed 0

Each job is a random program: verbs, messages with many tags, parts, steps of an optimizer, evaluations, communicators
that come and go, or one in which a rank differs from the others. What must hold: a correct program gives the result of
one process; where ranks disagree, every rank raises the same error within seconds; what is finalized leaves no memory,
descriptor or thread; nothing hangs. Jobs run by the dozen under one mpiexec. A job that fails is printed with its
number: ``--only NUMBER`` runs it again. ``--plant NAME`` breaks the code in a known way, which must be found.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("flat", "flat", "naive", "hierarchical", "two_dimensional")
MOST_SECONDS = 20.0  # for all ranks to raise; on a quiet machine it takes 3
Job = Callable[[Any, Any, random.Random], "str | None"]
KINDS: dict[str, Job] = {}


def kind(function: Job) -> Job:
    """A kind of job: called with mpi4py.MPI, the name of a communicator, and its chance; returns what is wrong."""
    KINDS[function.__name__] = function
    return function


def array_of(chance: random.Random, rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    """The array of a rank: every rank can make those of all."""
    rng = np.random.default_rng([chance.randrange(1 << 30), rank])
    return rng.integers(-4, 5, shape).astype(dtype)


def shape_of(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.choice([0, 1, 2, 3, 5]) for _ in range(chance.randrange(4)))


def create(name: str, **options: Any) -> Any:
    from dbrdist.comm import create_communicator

    return create_communicator(name, **options)


def differ(what: str, found: Any, expected: Any, tolerance: float = 0.0) -> str | None:
    if isinstance(expected, np.ndarray):
        same = np.shape(found) == expected.shape and np.allclose(
            np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance
        )
    else:
        same = found == expected
    return None if same else f"{what}: got {found!r}, expected {expected!r}"


# ---- correct programs ----


@kind
def verbs(mpi: Any, name: str, chance: random.Random) -> str | None:
    comm = create(name)
    ranks = range(comm.size)
    for _ in range(chance.randrange(3, 9)):
        verb = chance.choice(["allreduce", "bcast", "gather", "allgather", "alltoall", "scatter", "objects", "part"])
        shape, dtype = shape_of(chance), chance.choice(["f4", "f8", "f2", "i4", "i8", "?"])
        root, key = chance.randrange(comm.size), chance.randrange(1 << 30)
        each = [array_of(random.Random(key), r, shape, dtype) for r in ranks]
        mine, wrong = each[comm.rank], None
        if verb == "allreduce":
            total = np.logical_or.reduce(each) if dtype == "?" else np.sum(np.array(each, "f8"), 0)
            wrong = differ(verb, comm.allreduce(mine), np.asarray(total, "f8"))
        elif verb == "bcast":
            wrong = differ(verb, comm.bcast(mine, root=root), each[root])
        elif verb == "gather":
            found = comm.gather(mine, root)
            wrong = differ(verb, found is not None, comm.rank == root)
            wrong = wrong or next(filter(None, (differ(verb, a, b) for a, b in zip(found or (), each))), None)
        elif verb == "allgather":
            wrong = next(filter(None, map(lambda a, b: differ(verb, a, b), comm.allgather(mine), each)), None)
        elif verb == "alltoall":
            found = comm.alltoall([x + x.dtype.type(k % 2) for k, x in enumerate([mine] * comm.size)])
            expected = [x + x.dtype.type(comm.rank % 2) for x in each]
            wrong = next(filter(None, map(lambda a, b: differ(verb, a, b), found, expected)), None)
        elif verb == "scatter":
            wrong = differ(verb, comm.scatter(each if comm.rank == root else None, root), mine)
        elif verb == "objects":
            wrong = differ(verb, comm.allgather_obj((comm.rank, key)), [(r, key) for r in ranks])
        else:
            color = comm.rank % chance.choice([1, 2])
            part = comm.split(color, -comm.rank)
            found = [part.allgather_obj(comm.rank) for _ in range(chance.choice([1, 20]))][-1]
            others = [r for r in ranks if (r - comm.rank) % 2 == 0] if len(found) < comm.size else list(ranks)
            wrong = differ(verb, found, sorted(others, reverse=True))
            part.finalize()
        if wrong:
            return wrong
    comm.finalize()
    return None


@kind
def tags(mpi: Any, name: str, chance: random.Random) -> str | None:
    """Messages of many tags between two ranks; the others have sent none, and all meet before and after."""
    comm = create(name)
    count, step = chance.choice([10, 80, 300]), chance.choice([1, 7, 100])
    comm.barrier()
    sizes = [chance.choice([0, 1, 3, 5000]) for _ in range(count)]
    for number, size in enumerate(sizes):
        tag = number * step % 32768
        if comm.rank == 0 and comm.size > 1:
            comm.send(np.arange(size) + number, 1, tag) if number % 2 else comm.send_obj((size, number), 1, tag)
        elif comm.rank == 1:
            found = comm.recv(0, tag) if number % 2 else comm.recv_obj(0, tag)
            wrong = differ("message", found, np.arange(size) + number if number % 2 else (size, number))
            if wrong:
                return wrong
    comm.barrier()
    wrong = differ("after", int(comm.allreduce(np.array(1))), comm.size)
    comm.finalize()
    return wrong


@kind
def steps(mpi: Any, name: str, chance: random.Random) -> str | None:
    """Some steps over uneven batches: as one process that has all examples."""
    options = chance.choice([{}, {}, {"zero": 1}, {"zero": 2}, {"accumulate": 2}])
    return trained(name, chance, options, chance.random() < 0.3)


@kind
def late(mpi: Any, name: str, chance: random.Random) -> str | None:
    """Parameters that wait for their first input, in rounds of calls in which ranks may have no examples."""
    return trained(name, chance, {"accumulate": chance.choice([2, 3])}, True)


def trained(name: str, chance: random.Random, options: dict[str, Any], is_lazy: bool) -> str | None:
    from dbrdist import functions as F
    from dbrdist import links as L
    from dbrdist import optimizer_hooks as hooks
    from dbrdist import optimizers
    from dbrdist.comm import create_multi_node_optimizer

    comm = create(name, **chance.choice([{}, {"overlap": True}]) if name == "flat" else {})
    decay, num_out = chance.choice([0.0, 0.1]), chance.choice([1, 3])
    rule = chance.choice([lambda: optimizers.SGD(0.1), lambda: optimizers.MomentumSGD(0.1), lambda: optimizers.Adam()])

    def made() -> Any:
        model = L.Linear(4, num_out)
        model.W.array[...], model.b.array[...] = 0.5, 0
        return model

    model, one = made(), made()
    if is_lazy:
        model = L.Linear(None, num_out, initialW=0.5)
    optimizer, alone = create_multi_node_optimizer(rule(), comm, **options).setup(model), rule().setup(one)
    for each in (optimizer, alone):
        if decay:
            each.add_hook(hooks.WeightDecay(decay))
    num_calls = options.get("accumulate", 1)
    for _ in range(chance.randrange(1, 5)):
        together = []
        for _ in range(num_calls):
            counts = [chance.randrange(4) for _ in range(comm.size)]
            counts[chance.randrange(comm.size)] += 1
            rng = np.random.default_rng(chance.randrange(1 << 30))
            parts = [rng.standard_normal((n, 4)).astype(np.float32) for n in counts]
            mine, together = parts[comm.rank], [*together, *parts]
            loss = (lambda x: lambda: F.mean(model(x) ** 2))(mine) if len(mine) else lambda: None
            optimizer.update(loss, num_samples=len(mine))
        alone.update((lambda x: lambda: F.mean(one(x) ** 2))(np.concatenate(together)))
    wrong = differ(f"weights {options} {name} lazy {is_lazy}", model.W.array, one.W.array, 2e-4)
    comm.finalize()
    return wrong


@kind
def evaluation(mpi: Any, name: str, chance: random.Random) -> str | None:
    """Parts of a dataset, empty ones too; and ranks whose parameters differ for a while."""
    from dbrdist import iterators, optimizers
    from dbrdist import links as L
    from dbrdist.comm import create_multi_node_evaluator, create_multi_node_optimizer, scatter_dataset
    from dbrdist.training import extensions

    comm = create(name)
    rng = np.random.default_rng(chance.randrange(1 << 30))
    num = chance.choice([1, 2, 3, 7, 20])
    examples = [(rng.standard_normal(3).astype(np.float32), np.int32(k % 2)) for k in range(num)]
    weights, batch = rng.standard_normal((2, 3)).astype(np.float32), chance.choice([1, 4])

    def made(values: Any) -> Any:
        model = L.Classifier(L.Linear(3, 2))
        model.predictor.W.array[...], model.predictor.b.array[...] = values, 0
        return model

    model, local_steps = made(weights), chance.choice([1, 4])
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.5), comm, local_steps=local_steps).setup(model)
    for _ in range(3):
        optimizer.update(model, np.full((2, 3), comm.rank - 1.0, np.float32), np.array([0, 1], np.int32))
    values = [comm.allgather_obj(p.array) for p in model.params()]
    part = scatter_dataset(examples if comm.rank == 0 else None, comm, force_equal_length=False)
    iterator = iterators.SerialIterator(part, batch, repeat=False, shuffle=False)
    found = create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)()
    one = made(weights)
    for p, of_ranks in zip(one.params(), values):
        p.array[...] = np.mean(of_ranks, 0)
    iterator = iterators.SerialIterator(examples, batch, repeat=False, shuffle=False)
    expected = extensions.Evaluator(iterator, one)()
    comm.finalize()
    for key, value in expected.items():
        wrong = differ(f"{key} local_steps={local_steps}", np.array(float(found[key])), np.array(float(value)), 1e-4)
        if wrong:
            return wrong
    return None


@kind
def lifetimes(mpi: Any, name: str, chance: random.Random) -> str | None:
    """Communicators, parts, and the user's own communicator, which is freed once it was used."""

    def held() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as lines:
            maps = sum("memfd:dbrdist" in line for line in lines)
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

    create(name).finalize()
    before = held()
    for _ in range(chance.randrange(1, 4)):
        user = mpi.COMM_WORLD.Dup()
        comm = create(name, mpi_comm=user)
        user.Free()
        part = comm.split(comm.rank % 2, comm.rank)
        for _ in range(chance.choice([1, 25])):
            part.allreduce(np.ones(chance.choice([2, 30_000]), np.float32))
        (part.split(0, 0)).finalize()
        part.finalize()
        comm.finalize()
    after = held()
    return None if after <= before else f"descriptors, maps, threads: {before} before, {after} after"


@kind
def arguments(mpi: Any, name: str, chance: random.Random) -> str | None:
    """What is no communicator of ranks is refused in words."""
    value = chance.choice([mpi.COMM_NULL, 0, "world", mpi.COMM_WORLD.Get_group(), mpi.Comm, mpi.REQUEST_NULL])
    try:
        create(name, mpi_comm=value)
    except (TypeError, ValueError) as error:
        return None if "mpi_comm" in str(error) else f"no word of mpi_comm: {error}"
    return f"a communicator of {value!r}"


HELPER = """
import sys
from tests.fuzz import ranks
if sys.argv[1]:
    ranks.plant(sys.argv[1])
from dbrdist.comm import create_communicator
print(create_communicator().size, flush=True)
"""


@kind
def helpers(mpi: Any, name: str, chance: random.Random) -> str | None:
    """A process that a rank starts is no rank, and has a communicator of its own."""
    if chance.randrange(mpi.COMM_WORLD.size) != mpi.COMM_WORLD.rank:
        return None
    words = [sys.executable, "-c", HELPER, planted[0]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except subprocess.TimeoutExpired:
        return "a helper hangs"
    return differ("helper", (done.returncode, done.stdout), (0, "1\n"))


@kind
def reports(mpi: Any, name: str, chance: random.Random) -> str | None:
    """The record of the last verbs is a new file, whatever others have put into the folder for temporary files."""
    from dbrdist.comm.failure import watch

    comm = create(name)
    comm.barrier()
    with tempfile.TemporaryDirectory() as folder:
        victim, rank = Path(folder) / "victim", mpi.COMM_WORLD.rank
        victim.write_text("of another user")
        for middle in (f"rank{rank}", f"rank{rank}-{os.getpid()}", f"{os.getpid()}", f"{rank}"):
            (Path(folder) / f"dbrdist-verbs-{middle}.txt").symlink_to(victim)
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            watch.say_record()
        finally:
            tempfile.tempdir, watch._watch.is_ending = before, False
        made = [path for path in Path(folder).iterdir() if not path.is_symlink() and path != victim]
        wrong = differ("a file behind a link", victim.read_text(), "of another user")
        wrong = wrong or differ("new files", len(made), 1) or differ("rights", made[0].stat().st_mode & 0o777, 0o600)
    comm.finalize()
    return wrong


# ---- programs in which one rank differs ----


def disagreements(comm: Any, chance: random.Random, odd: int) -> dict[str, Callable[[], Any]]:
    """What a program does, by what differs on rank ``odd``."""
    from dbrdist import functions as F
    from dbrdist import links as L
    from dbrdist import optimizer_hooks as hooks
    from dbrdist import optimizers
    from dbrdist import random as chances
    from dbrdist.comm import Reduction, create_multi_node_evaluator, create_multi_node_optimizer
    from dbrdist.comm.data.evaluator import GenericMultiNodeEvaluator
    from dbrdist.comm.data.iterators import create_multi_node_iterator
    from dbrdist.comm.links import MultiNodeBatchNormalization
    from dbrdist.comm.run.snapshots import AverageStatistics
    from dbrdist.dataset import concat_examples
    from dbrdist.iterators import SerialIterator
    from dbrdist.training.extensions import Evaluator

    is_odd, x = comm.rank == odd, np.ones((2, 3), np.float32)

    def optimizer(hook: Any = None, rate: float = 0.1) -> Any:
        model = L.Linear(3, 2)
        made = create_multi_node_optimizer(optimizers.SGD(rate), comm).setup(model)
        if hook is not None:
            made.add_hook(hook)
        return made

    def train(*made: Any, **options: Any) -> None:
        for _ in range(2):
            for each in made:
                each.update(lambda each=each: F.sum(each.target(x)), **options)

    def order() -> None:
        one, other = optimizer(), optimizer()
        train(one, other)
        train(*((other, one) if is_odd else (one, other)))

    def noise() -> None:
        chances.set_seed(comm.rank if is_odd else 5000)
        train(optimizer(hooks.GradientNoise(0.1)))

    def frozen() -> None:
        made = optimizer()
        made.target.b.update_rule.enabled = not is_odd
        train(made)

    def drift() -> None:
        own = np.random.default_rng(comm.rank)
        made = optimizer()
        made.add_hook(lambda inner: [p.grad.__iadd__(own.standard_normal(p.shape)) for p in inner.target.params()])
        train(made)

    def changed() -> None:
        made = optimizer()
        train(made)
        made.target.W.array[...] += is_odd
        train(made)

    examples = [(x[0] + k, np.int32(k % 2)) for k in range(4 * comm.size)]
    part = {"rank": comm.rank, "size": comm.size, "seed": 7}

    def iterator() -> None:
        made, odd_one = L.Classifier(L.Linear(3, 2, initialW=1)), {"seed": 8} if is_odd else {}
        joint = create_multi_node_optimizer(optimizers.SGD(0.1), comm).setup(made)
        batches = SerialIterator(examples, 2 * comm.size, **part | odd_one)
        joint.update(made, *concat_examples(next(batches)))

    def dataset() -> None:
        rows = examples[:: -1 if is_odd else 1]
        test = SerialIterator(rows, comm.size, repeat=False, shuffle=False, **part)
        create_multi_node_evaluator(Evaluator(test, L.Classifier(L.Linear(3, 2, initialW=1))), comm)()

    def evaluators() -> None:
        tests = [SerialIterator(examples[:n], 2, repeat=False, shuffle=False) for n in (2, 4)]
        net = L.Classifier(L.Linear(3, 2, initialW=1))
        made = [create_multi_node_evaluator(Evaluator(test, net), comm) for test in tests]
        for each in made[:: -1 if is_odd else 1]:
            each()

    def normalization() -> None:
        MultiNodeBatchNormalization(3, comm, eps=1e-3 if is_odd else 2e-5)(np.stack([x[0] + k for k in range(3)]))

    def turned(made: list[Callable[[], Any]]) -> None:
        for use in made[:: -1 if is_odd else 1]:
            use()

    def reductions() -> None:
        made = []
        for value in (1, 2):
            model = L.Linear(3, 2, initialW=1)
            model.W.grad, model.b.grad = np.full((2, 3), value, np.float32), np.zeros(2, np.float32)
            made.append(Reduction(comm, model))
        turned([lambda one=one: (one.start(), one.wait()) for one in made])

    def iterators() -> None:
        turned([create_multi_node_iterator(SerialIterator([k] * 4, 2), comm).next for k in (1, 2)])

    def generic() -> None:
        tests = [SerialIterator(examples[:2], 2, repeat=False, shuffle=False) for _ in range(2)]
        turned([GenericMultiNodeEvaluator(comm, test, L.Classifier(L.Linear(3, 2))).evaluate for test in tests])

    def averages() -> None:
        made = [AverageStatistics(comm, L.BatchNormalization(3)) for _ in range(2)]
        turned([lambda one=one: one(None) for one in made])

    def messages() -> None:
        if comm.rank < 2:
            comm.send(np.ones(100_000), 1 - comm.rank, 3) if is_odd else comm.recv(1 - comm.rank, 4)
        comm.barrier()

    def crossed() -> None:
        (comm.recv(1 - comm.rank, 2) if comm.rank < 2 else None, comm.barrier())

    return {
        "verb": lambda: comm.barrier() if is_odd else comm.allreduce(x),
        "root": lambda: comm.bcast(x, root=int(is_odd)),
        "shape": lambda: comm.allreduce(x[:1] if is_odd else x),
        "type": lambda: comm.allreduce(x.astype("f8") if is_odd else x),
        "rate": lambda: train(optimizer(rate=0.2 if is_odd else 0.1)),
        "hook": lambda: train(optimizer(hooks.WeightDecay(0.2 if is_odd else 0.1))),
        "noise": noise, "order": order, "frozen": frozen,
        "count": lambda: train(optimizer(), num_samples=1.5 if is_odd else 1),
        "argument": lambda: comm.allreduce("x" if is_odd else x),
        "iterator": iterator, "dataset": dataset, "evaluators": evaluators, "normalization": normalization,
        "messages": messages, "crossed": crossed, "drift": drift, "changed": changed,
        "reductions": reductions, "iterators": iterators, "generic": generic, "averages": averages,
    }  # fmt: skip


@kind
def disagreement(mpi: Any, name: str, chance: random.Random) -> str | None:
    world = mpi.COMM_WORLD
    comm, odd = create(name), chance.randrange(min(world.size, 2))
    found = disagreements(comm, chance, odd)
    what = chance.choice(sorted(found))
    if comm.size == 1:
        return None
    began, said = time.monotonic(), ""
    try:
        found[what]()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    everyone = world.allgather(said)
    if "" in everyone:
        return f"{what} differs on rank {odd}, and nothing is raised on rank {everyone.index('')}"
    if len(set(everyone)) > 1:
        return f"{what} differs on rank {odd}, and the ranks raise {sorted(set(everyone))}"
    if seconds > MOST_SECONDS:
        return f"{what} differs on rank {odd}, and it took {seconds:.1f} s to say so"
    return None


# ---- planted faults, which must be found ----

planted = [""]  # the name of the fault, for processes that ranks start


def plant(name: str) -> None:
    """Break the code in a known way: one for each class of faults that was found once."""
    planted[0] = name
    from dbrdist.comm.communicators import mpi_communicator, shared_memory
    from dbrdist.comm.data import evaluator
    from dbrdist.comm.protocol import arguments as checks
    from dbrdist.comm.steps import optimizer_settings
    from dbrdist.comm.transport import call_log, mpi
    from dbrdist.datasets.loading import serial

    if name == "counts-forget":
        count = call_log.CallLog.count

        def forgetful(self: Any, *key: Any) -> int:
            number = count(self, *key)
            while len(self._counts) > 60:
                del self._counts[next(iter(self._counts))]
            return number

        call_log.CallLog.count = forgetful
    elif name == "own-networks":
        evaluator.one_network = lambda comm, links: contextlib.nullcontext("")
    elif name == "seeds-differ":
        real = optimizer_settings.described
        optimizer_settings.described = lambda *args: [word for word in real(*args) if "seed" not in str(word)]
        optimizer_settings.OptimizerValues.look = _look_without_seeds(optimizer_settings.OptimizerValues.look)
        _plant_more("drift-unseen")  # which finds what different seeds make of the parameters
    elif name == "cut-counts":
        checks.num_samples = lambda value, what: None if value is None else int(value)
    elif name == "users-communicator":
        real_part = mpi_communicator.MpiRanks.part

        def from_users(self: Any, ranks: Any) -> Any:
            self.user_comm.Get_size()
            return real_part(self, ranks)

        mpi_communicator.MpiRanks.part = from_users
    elif name == "unchecked":
        mpi.checked = lambda mpi_comm: mpi_comm if hasattr(mpi_comm, "Idup") else mpi.start().COMM_WORLD
    elif name == "kept-memory":
        kept: list[Any] = []
        free = shared_memory.FlatReducer.free
        shared_memory.FlatReducer.free = lambda self: (kept.append(self._shared), free(self))[1]
    elif name == "no-empty-parts":
        real_check = serial._check_arguments

        def strict(dataset: Any, *args: Any) -> None:
            real_check(dataset, *args)
            if not len(dataset):
                raise ValueError("expected a dataset with examples")

        serial._check_arguments = strict
    elif name in PLANTS:
        _plant_more(name)
    else:
        raise ValueError(f"unknown plant {name!r}")


def _plant_more(name: str) -> None:
    from dbrdist.comm.data import evaluator
    from dbrdist.comm.failure import watch
    from dbrdist.comm.functions import normalization
    from dbrdist.comm.protocol import gate, shares
    from dbrdist.comm.steps import drift, introduction
    from dbrdist.comm.steps.policies import all_ranks, policy
    from dbrdist.comm.transport import environment

    if name == "drift-unseen":
        drift.Drift.look = lambda self, t: None
    elif name == "orders-unseen":
        introduction.batches_in_words = lambda *args: []
        introduction.check_examples = lambda *args: None
        introduction.Introduction._what_was_read = lambda self: (introduction._UNKNOWN, (), 0, ())
    elif name == "things-unseen":
        gate.Gate.of = lambda self, owner: contextlib.nullcontext()
    elif name == "examples-unseen":
        shares.ranks_with_others = lambda *args: []
    elif name == "evaluators-unseen":
        evaluator.are_same = lambda entries: True
    elif name == "normalizations-unseen":
        normalization._MARKS = 0
    elif name == "late-alone":
        all_ranks.AllRanks.work_alone = policy.StepPolicy.work_alone
    elif name == "helpers-are-ranks":
        environment.is_helper = lambda *environ: False
    else:

        def named(prefix: str, suffix: str, dir: str) -> tuple[int, str]:
            path = os.path.join(dir, f"{prefix.rstrip('-')}{suffix}")
            return os.open(path, os.O_WRONLY | os.O_CREAT), path

        watch.tempfile = types.SimpleNamespace(mkstemp=named, gettempdir=tempfile.gettempdir)


def _look_without_seeds(look: Any) -> Any:
    def planted(self: Any, settings: str) -> None:
        look(self, settings)
        self.text = "\n".join(line for line in self.text.splitlines() if "seed" not in line)
        self.digest = len(self.text)

    return planted


PLANTS = ("counts-forget", "own-networks", "seeds-differ", "cut-counts", "users-communicator", "unchecked",
          "kept-memory", "no-empty-parts", "late-alone", "helpers-are-ranks", "known-file", "drift-unseen",
          "orders-unseen", "examples-unseen", "evaluators-unseen", "normalizations-unseen",
          "things-unseen")  # fmt: skip


# ---- running them ----


def body(seed: str, numbers: list[int], kinds: list[str], planted: str | None, seconds: float) -> None:
    """On each rank: the jobs, and one line for each with what is wrong."""
    from mpi4py import MPI

    if planted:
        plant(planted)
    for number in numbers:
        faulthandler.dump_traceback_later(seconds, exit=True)  # MPI ends the other ranks then
        chance = random.Random(f"{seed}/{number}")
        what, name = chance.choice(kinds), chance.choice(NAMES)
        try:
            wrong = KINDS[what](MPI, name, chance)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        everyone = MPI.COMM_WORLD.allgather(wrong)
        if MPI.COMM_WORLD.rank == 0:
            shown = next((f"rank {rank}: {words}" for rank, words in enumerate(everyone) if words), "")
            line = json.dumps([number, f"{what} {name}", shown[:600]])
            os.write(1, f"\nresult {line}\n".encode())
    faulthandler.cancel_dump_traceback_later()


def batch(num_ranks: int, numbers: list[int], given: argparse.Namespace) -> list[Any]:
    """Run some jobs under one mpiexec: for each [number, kind, what is wrong]."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PYTEST_", "DBRDIST_"))}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}", "OMP_NUM_THREADS": "1"}
    task = json.dumps([given.seed, numbers, given.kinds, given.plant, given.limit])
    words = [Path(sys.executable).with_name("mpiexec"), "-n", str(num_ranks), sys.executable, __file__, "--body", task]
    child = subprocess.Popen(
        words, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=given.limit * (1 + len(numbers)))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        err = "it hung"
    found = [json.loads(line.removeprefix("result ")) for line in out.splitlines() if line.startswith("result ")]
    done = {number for number, *_ in found}
    left = [number for number in numbers if number not in done]
    if left:
        found.append([left[0], "?", f"the job ended before its result: {err.strip()[-600:]}"])
        if left[1:] and not given.stop:
            found += batch(num_ranks, left[1:], given)
    elif child.returncode:
        found.append([numbers[-1], "?", f"exit code {child.returncode}: {err.strip()[-600:]}"])
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", type=int)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--batch", type=int, default=12, help="jobs under one mpiexec")
    parser.add_argument("--plant", choices=PLANTS, help="break the code, to see that it is found")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one job")
    parser.add_argument("--stop", action="store_true", help="stop at the first fault")
    parser.add_argument("--body", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.body is not None:
        body(*json.loads(given.body))
        return 0
    numbers = [given.only] if given.only is not None else [*range(given.jobs)]
    bad, began = 0, time.monotonic()
    for begin in range(0, len(numbers), given.batch):
        some = numbers[begin : begin + given.batch]
        num_ranks = given.ranks[some[0] // given.batch % len(given.ranks)]
        if bad and given.stop:
            break
        for number, what, wrong in batch(num_ranks, some, given):
            if wrong:
                bad += 1
                print(f"job {number} ({what}, {num_ranks} ranks): {wrong}", flush=True)
    print(f"{len(numbers)} jobs, {bad} faults, seed {given.seed}, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    sys.exit(main())
