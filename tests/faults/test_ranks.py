"""Several ranks: what earlier versions got wrong without an error, refused though it was right, or waited for."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.mpiexec]

BEGIN = """
import os, sys
import numpy as np
import dbrdist
import dbrdist.functions as F, dbrdist.links as L
from dbrdist import iterators, optimizers, optimizer_hooks
from dbrdist.comm import create_communicator, create_multi_node_evaluator, create_multi_node_optimizer, scatter_dataset
from mpi4py import MPI

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def tried(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
"""


def test_messages_do_not_use_up_the_count_of_collectives(start):
    """A rank that has talked in thousands of tags takes part in a barrier as before."""
    code, text = start.ranks(3, BEGIN + """
c = create_communicator("flat")
c.barrier()
for t in range(4200):
    if c.rank == 0: c.send(np.ones(1), 1, t)
    if c.rank == 1: c.recv(0, t)
say("barrier:", tried(c.barrier))
""")  # fmt: skip
    assert text.count("barrier: None") == 3 and code == 0, text


def test_a_deadlock_is_found_after_thousands_of_tags(start):
    """Two ranks that receive from each other are told so, however many messages were sent before."""
    code, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
for t in range(4200):
    if c.rank == 0: c.send(np.ones(1), 1, t)
    if c.rank == 1: c.recv(0, t)
say("ended:", tried(lambda: c.recv(1 - c.rank, 7)))
""", limit_seconds=40)  # fmt: skip
    assert code != "hung" and "ended: " in text, f"{code}: {text}"


@pytest.mark.parametrize(
    "words", [["local_steps=8", "ema.decay=0.95"], ["local_steps=16"]], ids=["averages", "weights"]
)
def test_ranks_evaluate_one_network(start, words):
    """With steps that ranks make alone, the logged test loss is that of the network in the snapshot."""
    text = (
        "model: mlp\ndata: digits\nbatch: 64\nepochs: 2\nseed: 0\noptimizer: {name: momentum_sgd, lr: 0.05}\nout: run\n"
    )
    start.file("c.yaml", text)
    code, _ = start("mpiexec", "-n", 2, "dbrdist-train", "c.yaml", *words)
    if code == 0:  # it may be refused instead
        log = [json.loads(line) for line in (start.folder / "run" / "log.jsonl").read_text().splitlines()]
        _, text = start("dbrdist-train", "--evaluate", "run")
        found = float(re.search(r"validation/main/loss\W+([\d.]+)", text).group(1))
        assert abs(log[-1]["validation/main/loss"] - found) < 1e-3, (log[-1], text)


def test_noise_from_seeds_of_ranks_does_not_part_the_ranks(start):
    """Ranks that seed by their number are refused by a hook that all must draw alike, or have the same weights."""
    _, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
dbrdist.random.set_seed(c.rank)
net = L.Linear(2, 1, initialW=1.0)
optimizer = create_multi_node_optimizer(optimizers.SGD(0.1), c).setup(net)
optimizer.add_hook(optimizer_hooks.GradientNoise(0.3))
def train():
    for _ in range(5):
        optimizer.update(lambda: F.sum(net(np.ones((1, 2), "f"))))
    return net.W.array.ravel().tolist()
say("weights:", tried(train))
""")  # fmt: skip
    weights = re.findall(r"weights: (.*)", text)
    assert len(weights) == 2 and (weights[0] == weights[1] or "Error" in weights[0] + weights[1]), text


def test_numbers_of_samples_are_not_cut_to_whole_ones(start):
    """Sums of weights as numbers of samples are refused or count as they are: a mean of 3 and 1 by 0.5 and 1.5."""
    _, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
net = L.Linear(1, 1, nobias=True, initialW=0.0)
optimizer = create_multi_node_optimizer(optimizers.SGD(1.0), c).setup(net)
x = np.full((1, 1), 3.0 if c.rank == 0 else 1.0, "f")
def train():
    optimizer.update(lambda: F.sum(net(x)), num_samples=0.5 if c.rank == 0 else 1.5)
    return -float(net.W.array[0, 0])
say("step:", tried(train))
""")  # fmt: skip
    steps = re.findall(r"step: (.*)", text)
    assert len(steps) == 2 and (all("Error" in s for s in steps) or steps == ["1.5"] * 2), text


def test_optimizers_that_step_in_another_order_do_not_mix_their_gradients(start):
    """Two optimizers that two ranks update in opposite orders are found out."""
    _, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
nets = [L.Linear(1, 1, nobias=True, initialW=0.0) for _ in range(2)]
both = [create_multi_node_optimizer(optimizers.SGD(1.0), c).setup(net) for net in nets]
def train():
    for k in ((0, 1) if c.rank == 0 else (1, 0)):
        both[k].update(lambda: F.sum(nets[k](np.full((1, 1), 1.0 + 8 * k, "f"))))
    return [-float(net.W.array[0, 0]) for net in nets]
say("steps:", tried(train))
""")  # fmt: skip
    steps = re.findall(r"steps: (.*)", text)
    assert steps and all("Error" in s or s == "[1.0, 9.0]" for s in steps), text


def test_the_programs_own_communicator_may_be_freed(start):
    """A communicator needs nothing of the user's MPI communicator after it was made from it."""
    code, text = start.ranks(2, BEGIN + """
user = MPI.COMM_WORLD.Dup()
c = create_communicator("flat", mpi_comm=user)
user.Free()
say("part:", c.split(0, c.rank).allreduce(np.ones(1)))
""")  # fmt: skip
    assert text.count("part: [2.]") == 2 and code == 0, text


@pytest.mark.parametrize("given", ["MPI.COMM_NULL", "'world'", "MPI.COMM_WORLD.Get_group()"])
def test_what_is_no_communicator_is_refused_in_words(start, given):
    """A wrong mpi_comm is an error that names the argument, not the end of the job in MPI's words."""
    program = BEGIN + f"say('refused:', tried(lambda: create_communicator('flat', mpi_comm={given})))"
    code, text = start.ranks(2, program, limit_seconds=40)
    assert len(re.findall("refused: (?:Value|Type)Error: .*mpi_comm", text)) == 2, f"{code}: {text}"


def test_a_communicator_after_the_end_of_mpi_is_refused_in_words(start):
    _, text = start.ranks(2, BEGIN + """
create_communicator("flat").finalize()
MPI.Finalize()
say("refused:", tried(lambda: create_communicator("flat")))
""")  # fmt: skip
    assert len(re.findall("refused: .*Error: ", text)) == 2, text


def test_the_end_of_a_communicator_gives_back_its_descriptors(start):
    _, text = start.ranks(3, BEGIN + """
import gc
def made():
    create_communicator("flat").finalize()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
made()
first = made()
say("more:", max(made() for _ in range(8)) - first)
""")  # fmt: skip
    assert text.count("more: 0\n") == 3, text


def test_a_part_without_examples_can_be_read(start):
    """An iterator that does not repeat may be empty, as parts of a small dataset are."""
    _, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
part = scatter_dataset([(np.ones(1, "f"), 0)] if c.rank == 0 else None, c, force_equal_length=False)
say("batches:", tried(lambda: sum(1 for _ in iterators.SerialIterator(part, 4, repeat=False))))
""")  # fmt: skip
    assert sorted(re.findall("batches: (.*)", text)) == ["0", "1"], text


def test_accumulated_steps_of_parameters_that_wait_for_their_first_input(start):
    """A rank without examples in the first round takes part in it, as it does without accumulation."""
    _, text = start.ranks(2, BEGIN + """
c = create_communicator("flat")
net = L.Linear(None, 1, nobias=True, initialW=0.0)
optimizer = create_multi_node_optimizer(optimizers.SGD(1.0), c, accumulate=2).setup(net)
def train():
    for _ in range(2):
        if c.rank == 0:
            optimizer.update(lambda: F.sum(net(np.ones((1, 3), "f"))), num_samples=1)
        else:
            optimizer.update(lambda: None, num_samples=0)
    return net.W.array.ravel().tolist()
say("weights:", tried(train))
""")  # fmt: skip
    assert text.count("weights: [-1.0, -1.0, -1.0]") == 2, text


def test_a_process_that_a_rank_starts_is_a_rank_of_its_own(start):
    _, text = start.ranks(2, BEGIN + """
import subprocess
HELPER = "from dbrdist.comm import create_communicator; print(create_communicator().size)"
done = subprocess.run([sys.executable, "-c", HELPER], capture_output=True, text=True, timeout=20)
say("helper:", done.returncode, done.stdout.strip())
""", limit_seconds=40)  # fmt: skip
    assert text.count("helper: 0 1") == 2, text


def test_the_notes_of_a_failed_job_follow_no_link(start):
    """What a job writes into the folder for temporary files is no file that another user could have put there."""
    (start.folder / "tmp").mkdir()
    victim = start.file("victim", "precious")
    program = (
        BEGIN
        + """
c = create_communicator("flat")
c.barrier()
say("number", c.rank, os.getpid())
if sys.argv[1:]:
    name = sys.argv[1].replace("PID", str(os.getpid())).replace("RANK", str(c.rank))
    os.symlink("../victim", os.path.join("tmp", name))
if c.rank == 1:
    raise ValueError("odd")
c.barrier()
"""
    )
    _, text = start.ranks(2, program, TMPDIR=str(start.folder / "tmp"))
    number = re.search(r"number 1 (\d+)", text).group(1)
    for name in {p.name for p in (start.folder / "tmp").iterdir() if number in p.name} or {"none"}:
        foretold = name.replace(number, "PID").replace("rank1", "rankRANK")
        start.ranks(2, program, foretold, TMPDIR=str(start.folder / "tmp"))
    assert victim.read_text() == "precious"
