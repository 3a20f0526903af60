"""The fuzzer of ranks passes, and finds a planted fault of every class."""

import pytest

from tests.comm import jobs
from tests.fuzz import ranks

pytestmark = [pytest.mark.mpiexec, pytest.mark.timeout(300)]

# Kinds of jobs in which a planted fault shows.
WHERE = {
    "counts-forget": "tags", "own-networks": "evaluation", "seeds-differ": "disagreement",
    "cut-counts": "disagreement", "users-communicator": "lifetimes", "unchecked": "arguments",
    "kept-memory": "lifetimes", "no-empty-parts": "evaluation",
    "late-alone": "late", "helpers-are-ranks": "helpers", "known-file": "reports",
    "drift-unseen": "disagreement", "orders-unseen": "disagreement", "examples-unseen": "disagreement",
    "evaluators-unseen": "disagreement", "normalizations-unseen": "disagreement",
    "things-unseen": "disagreement",
}  # fmt: skip


def test_a_few_random_jobs():
    jobs.mpiexec()
    assert ranks.main(["--jobs", "12", "--ranks", "3", "--seed", "7"]) == 0


def test_each_planted_fault_has_its_jobs():
    assert set(WHERE) == set(ranks.PLANTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.PLANTS)
def test_a_planted_fault_is_found(name):
    jobs.mpiexec()
    words = ["--jobs", "120", "--ranks", "3", "--seed", "3", "--limit", "15", "--stop"]
    assert ranks.main([*words, "--plant", name, "--kinds", WHERE[name]]) == 1
