"""`dbrdist-train` with virtual workers under mpiexec: the same bits, resumed on any number of ranks, and the audit."""

import re
from pathlib import Path

import numpy as np
import pytest

from dbrdist.cli.output import refuse
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import finish, lines, same_runs

pytestmark = [pytest.mark.timeout(90), pytest.mark.slow]
WORDS = [
    "run.yaml",
    "batch={virtual_workers: 4, per_worker: 61}",  # 1442 examples: five steps of 244 and one of 222
    "reproducible=true",
    "audit=true",
    "epochs=2",
    "iterations=9",
    "log.every=1 iteration",
    "optimizer.hooks=[{name: gradient_clipping, threshold: 1.0}]",
]
few_in_last_batch = pytest.mark.filterwarnings("ignore:BatchNormalization. one value per channel")  # of 1,442 two


def test_ranks_give_the_same_bits_and_resume_on_others(ranks, run):
    code, out, err = run(*WORDS, "out=straight")
    assert code == 0, err
    plan = "ranks: 1; batch: 244, that is 4 virtual workers of 61, reproducible with 1 thread per rank"
    assert plan in " ".join(out.split())
    assert finish(ranks(2, *WORDS, "out=cut", "iterations=4"))[0] == 0
    code, _, err = finish(ranks(4, *WORDS, "out=cut", "--resume"))
    assert code == 0, err
    same_runs("straight", "cut", extra_evaluation_at=4)

    code, out, err = run("--audit", "cut")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "start 1: from step 0, 2 ranks, 4 workers",
        "start 2: from step 4, 4 ranks, 4 workers",
        "epoch 0: 1,442 of 1,442 examples, each once, in steps 1 to 6",
        "epoch 1: 732 of 1,442 examples so far, each once, in steps 7 to 9",
        "cut: no example was used twice in an epoch, and none was left out of a finished one",
    ]
    last = Path("cut/audit/start-0002-rank-00001.txt")
    text = last.read_text()
    last.write_text(re.sub(r"(?m)^6 0 1: (\d+) (\d+)", r"6 0 1: \1 \1", text))
    code, out, err = run("--audit", "cut")
    assert code == 1
    doubled, lost = re.search(r"(?m)^6 0 1: (\d+) (\d+)", text).groups()
    assert err.splitlines() == [
        f"cut: epoch 0: used more than once: examples {doubled}",
        f"cut: epoch 0: never used: examples {lost}",
    ]


@few_in_last_batch
def test_a_killed_run_goes_on_with_fewer_ranks(ranks, run):
    """Killed after the snapshot of the fourth step; in the seventh one of the three workers has no example."""
    words = [*WORDS, "snapshot.every=4 iterations", "iterations=8", "batch={virtual_workers: 3, per_worker: 80}"]
    assert run(*words, "out=straight")[0] == 0
    assert (
        finish(ranks(2, *words, "out=cut", "model.args.kill_at=6", KILL_RANK="0"))[0] != 0
    )  # a worker, rank 0 has one
    code, _, err = run(*words, "out=cut", "--resume")
    assert code == 0, err
    same_runs("straight", "cut")
    code, out, _ = run("--audit", "cut")
    assert code == 0
    assert "epoch 0: 1,442 of 1,442 examples, each once, in steps 1 to 7" in out


AKIBA = (
    "optimizer={name: rmsprop_warmup, lr: 0.4, alpha: 0.99, eps: 1.0e-8, lr_rmsprop: 3.0e-4, a_sgd: 1.0, hooks: "
    "[{name: weight_decay, rate: 1.0e-4}], schedule: {name: step, milestones: [0, 1], factors: [0.5, 0.075]}}",
    "schedules=[{of: optimizer.a_sgd, schedule: {name: elu, center: 0.5, period: 0.5}}]",
    "gradient_dtype=float16",
    "batch_norm.statistics=last",
)


@few_in_last_batch
def test_a_killed_run_of_akibas_recipe_goes_on_with_the_same_bits(ranks, run):
    """Golden number 21 of large batches: weights, m, D, rates, share of SGD and the order of examples."""
    words = [*WORDS, *AKIBA, "snapshot.every=4 iterations", "iterations=16", "log.every=1 iteration"]
    words.append("batch={virtual_workers: 3, per_worker: 40}")
    assert run(*words, "out=straight")[0] == 0
    assert finish(ranks(2, *words, "out=cut", "model.args.kill_at=15", KILL_RANK="1"))[0] != 0
    written = {path.name for path in Path("cut").glob("snapshot_iter_*")}  # in the background: perhaps not the last
    assert written
    assert written <= {f"snapshot_iter_{step}" for step in (4, 8, 12)}
    code, _, err = run(*words, "out=cut", "--resume")
    assert code == 0, err
    same_runs("straight", "cut")
    kept = dict(np.load(snapshots.newest("cut")))
    assert {name.rsplit("/", 1)[1] for name in kept if "/l1/W/" in name} == {"m", "v", "t"}
    rates = [entry["lr"] for entry in lines("cut/log.jsonl")]
    assert rates == pytest.approx([0.2] * 13 + [0.03] * 3, rel=1e-12)


def test_more_ranks_than_workers(ranks):
    code, _, err = finish(ranks(3, *WORDS, "batch={virtual_workers: 2, per_worker: 60}"))
    assert code == refuse.WRONG
    assert err.count("batch.virtual_workers: 2 for 3 ranks: every rank needs one; use at most 2 ranks") == 1
    assert "Traceback" not in err
