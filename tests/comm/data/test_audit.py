"""The audit: what its files say, and what the check finds in them."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.data import audit
from dbrdist.iterators import SerialIterator
from tests.each import each


class FakeTrainer:
    """What the extension needs of a trainer."""

    def __init__(self, out, iteration=0):
        self.out = str(out)
        self.updater = self
        self.iteration = iteration


def record(out, num_ranks, steps, begin=0, state=None, num_examples=50, batch=16, **options):
    """Some steps of iterators, as a run would take them; returns the state of one of them."""
    options = {"virtual_workers": 4, "last": "short", "seed": 1} | options

    def work(comm):
        iterator = SerialIterator(np.arange(num_examples), batch, rank=comm.rank, size=comm.size, **options)
        if state is not None:
            iterator._state = state
        log = audit.AuditLog(comm, iterator)
        trainer = FakeTrainer(out, begin)
        log.initialize(trainer)
        for _ in range(steps):
            iterator.next()
            trainer.iteration += 1
            log(trainer)
        log.finalize()
        return iterator._state

    return run_threads(num_ranks, work, timeout_seconds=30)[0]


def test_the_files_are_plain_text(tmp_path):
    record(tmp_path, 2, 4, num_examples=9, batch=4, shuffle=False)
    assert sorted(os.listdir(tmp_path / "audit")) == ["start-0001-rank-00000.txt", "start-0001-rank-00001.txt"]
    assert (tmp_path / "audit/start-0001-rank-00001.txt").read_text() == (
        "dbrdist audit 1\n"
        "start 1 from step 0, rank 1 of 2, workers 2 to 3 of 4, 9 examples, 9 per epoch\n"
        "1 0 2: 2\n1 0 3: 3\n2 0 2: 6\n2 0 3: 7\n3 - 2:\n3 0 3: 8\n4 1 2: 2\n4 1 3: 3\n"
    )


@pytest.mark.parametrize("options", [{}, {"last": "wrap"}, {"last": "drop"}, {"virtual_workers": None}])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_straight_run(tmp_path, num_ranks, options):
    record(tmp_path, num_ranks, 11, **options)
    found = audit.check(str(tmp_path), 11)
    assert found.problems == []
    per_epoch = 48 if options.get("last") == "drop" else 50
    assert found.findings[1].startswith(f"epoch 0: {per_epoch} of {per_epoch} examples, each once, in steps 1 to ")


def test_starts_on_other_numbers_of_ranks(tmp_path):
    """Seven steps of which the snapshot has five; then three more on another number of ranks."""
    state = record(tmp_path, 4, 5)
    for path in (tmp_path / "audit").iterdir():
        text = path.read_text()
        path.write_text(text + text.splitlines()[-1].replace("5 1", "6 1", 1) + "\n7 1 0: 3 4")  # and half a line
    record(tmp_path, 3, 3, begin=5, state=state)
    found = audit.check(str(tmp_path), 8)
    assert found.problems == []
    assert found.findings == [
        "start 1: from step 0, 4 ranks, 4 workers",
        "start 2: from step 5, 3 ranks, 4 workers",
        "epoch 0: 50 of 50 examples, each once, in steps 1 to 4",
        "epoch 1: 50 of 50 examples, each once, in steps 5 to 8",
    ]


def test_an_epoch_so_far(tmp_path):
    record(tmp_path, 1, 5)
    assert audit.check(str(tmp_path)).findings[-1] == "epoch 1: 16 of 50 examples so far, each once, in step 5"


def spoil(out, old, new, rank=0):
    path = Path(out) / f"audit/start-0001-rank-{rank:05d}.txt"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        ("2 0 1: 5\n", "2 0 1: 4\n", ["epoch 0: used more than once: examples 4", "epoch 0: never used: examples 5"]),
        ("2 0 1: 5\n", "", ["not every worker has a line for steps 2", "epoch 0: never used: examples 5"]),
        ("2 0 1: 5\n", "2 0 1: 5 6\n", ["epoch 0: used more than once: examples 6"]),
        ("2 0 1: 5\n", "2 1 1: 5\n", ["epoch 1: used more than once: examples 5", "epoch 0: never used: examples 5"]),
        (
            "2 0 1: 5\n",
            "2 0 1: 99\n",
            ["{}: step 2: no example has the index 99", "epoch 0: never used: examples 5"],
        ),
        (
            "2 0 1: 5\n",
            "nonsense\n",
            [
                "{}:6: expected STEP EPOCH WORKER: INDICES",
                "not every worker has a line for steps 2",
                "epoch 0: never used: examples 5",
            ],
        ),
        (
            "dbrdist audit 1\n",
            "dbrdist audit 2\n",
            [
                "{}:2: expected the head of an audit file",
                "start 1: the files of ranks 0 are missing",
                "not every worker has a line for steps 1, 2, 3, 4, 5 and 2 more",
                "epoch 0: never used: examples 0, 1, 4, 5",
                "epoch 1: never used: examples 0, 1, 4, 5",
            ],
        ),
    ],
)
def test_what_is_found(tmp_path, old, new, problems):
    record(tmp_path, 2, 7, num_examples=9, batch=4, shuffle=False)  # 1 0 0: 0, 1 0 1: 1 | 2: 2, 3: 3; ...
    spoil(tmp_path, old, new)
    first = str(tmp_path / "audit/start-0001-rank-00000.txt")
    assert sorted(audit.check(str(tmp_path)).problems) == sorted(p.format(first) for p in problems)


def test_the_last_steps_are_missing(tmp_path):
    record(tmp_path, 1, 3)
    assert audit.check(str(tmp_path), 5).problems == ["not every worker has a line for steps 4, 5"]


def test_no_files(tmp_path):
    with pytest.raises(ValueError, match="expected the files of an audit, found none; train with audit: true"):
        audit.check(str(tmp_path))


@each(**{"num, words": [(1, "1 rank"), (2, "2 ranks")]})
def test_starts_of_a_run_are_described(num, words):
    check = object.__new__(audit._Check)
    head = SimpleNamespace(first_step=5, num_ranks=num, num_workers=3 - num)
    check._starts = {2: [head], 1: [SimpleNamespace(first_step=0, num_ranks=3, num_workers=1)]}
    workers = "2 workers" if num == 1 else "1 worker"
    assert list(check._describe_starts()) == [
        "start 1: from step 0, 3 ranks, 1 worker", f"start 2: from step 5, {words}, {workers}",
    ]  # fmt: skip


@each(
    **{
        "num_steps, workers, bad": [
            (0, {}, ""), (2, {1: {0, 1}, 2: {0, 1}}, ""), (0, {1: {0, 1}, 2: {0}}, "2"),
            (3, {1: {0, 1}, 2: {1, 0}}, "3"),
            (2, {2: {0, 1}}, "1"), (4, {1: {0, 1}, 2: {0, 1}, 3: {0}, 4: {0, 1}}, "4"),
        ]
    }
)  # fmt: skip
def test_every_worker_has_a_line_for_every_step(num_steps, workers, bad):
    """Two workers up to step 2, one from there on."""
    check = object.__new__(audit._Check)
    check._num_steps, check._workers, check._problems = num_steps, workers, []
    check._starts = {
        1: [SimpleNamespace(first_step=0, num_workers=2)], 2: [SimpleNamespace(first_step=2, num_workers=1)],
    }  # fmt: skip
    check._last_step = {1: 2, 2: 100}.get
    check._look_at_steps()
    assert check._problems == ([f"not every worker has a line for steps {bad}"] if bad else [])


@pytest.mark.slow
@each(longest=[3, 70_000])
def test_of_a_run_that_continues_only_common_steps_count(tmp_path, longest):
    """Rank 0 is three steps ahead, in the next epoch, and is just writing a line."""
    out = tmp_path / str(longest)
    record(out, 2, 9, num_examples=max(longest, 50), batch=max(longest, 16), virtual_workers=2)
    path = out / "audit/start-0001-rank-00001.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]) + lines[-3][:2])
    assert audit.check(str(out)).problems
    found = audit.check(str(out), is_running=True)
    assert found.problems == []


@each(
    head=[
        "start 1 from step 0, rank 0 of 999999999999, workers 0 to 1 of 2, 9 examples, 9 per epoch",
        "start 1 from step 0, rank 0 of 1, workers 0 to 1 of 999999999999, 9 examples, 9 per epoch",
        "start 1 from step 0, rank 0 of 1, workers 0 to 1 of 2, 999999999999999 examples, 9 per epoch",
        f"start 1 from step 0, rank 0 of 1, workers 0 to 1 of 2, {'9' * 5000} examples, 9 per epoch",
    ]
)
def test_numbers_that_a_file_claims_cost_no_memory(tmp_path, head):
    (tmp_path / "audit").mkdir(exist_ok=True)
    (tmp_path / "audit/start-0001-rank-00000.txt").write_text(f"dbrdist audit 1\n{head}\n1 0 0: 3\n1 0 1: 4\n")
    (problem,) = audit.check(str(tmp_path)).problems
    assert problem.endswith("expected the head of an audit file")


@pytest.mark.slow
def test_a_step_that_a_line_claims_costs_no_time(tmp_path):
    record(tmp_path, 1, 3)
    path = tmp_path / "audit/start-0001-rank-00000.txt"
    path.write_text(path.read_text() + f"{10**14} 0 0: 1\n{10**17} 0 0: 1\n3 0 0: {10**30}\n")
    problems = audit.check(str(tmp_path)).problems
    assert sum("expected STEP EPOCH WORKER: INDICES" in problem for problem in problems) == 2
    assert "there are lines for 4 steps of 100,000,000,000,000" in problems


@each(
    case=[
        (1 << 24, 1, 9, True), (1, 1 << 24, 9, True), (1, 1, 1 << 33, True), ((1 << 24) + 1, 1, 9, False),
        (1, (1 << 24) + 1, 9, False), (1, 1, (1 << 33) + 1, False),
    ]
)  # fmt: skip
def test_heads_of_as_many_ranks_and_examples_as_there_may_be(tmp_path, case):
    num_ranks, num_workers, num_examples, is_taken = case
    head = f"start 1 from step 0, rank 0 of {num_ranks}, workers 0 to 1 of {num_workers}, {num_examples} examples"
    (tmp_path / "a").write_text(f"dbrdist audit 1\n{head}, 9 per epoch\n")
    assert (audit._read_head(str(tmp_path / "a")) is not None) is is_taken


@each(
    case=[
        (b"", 0), (b"7 0 1: 3\n", 6), (b"7 0 1: 3", 0), (b"5 0 1: 3\n7 0 1: 3\n", 6), (b"5 0 1: 3\n7 0 1", 4),
        (b"head\n", 0), (b"1 0 0: 1\n9 0 1: " + b"3, " * 200_000 + b"3\n", 8),
        (b"12 0 0: 1\n9 0 1: " + b"3" * 9000, 11),
        (b"9" * 15 + b" 0\n", 10**15 - 2), (b"9" * 16 + b" 0\n", 0),
    ]
)  # fmt: skip
def test_the_last_step_that_a_file_has_whole(tmp_path, case):
    content, step = case
    (tmp_path / "a").write_bytes(content)
    assert audit._last_step_in(str(tmp_path / "a")) == step
