"""A sample of the random configurations; tests/cli/random_configurations.py tries thousands."""

import sys
from pathlib import Path

import pytest

from dbrdist.errors import NonFiniteLossError
from tests.cli.random_configurations import OWN, attempt, judge


@pytest.fixture
def own(folder):
    Path("own.py").write_text(OWN)
    yield
    sys.modules.pop("own", None)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_each_runs_or_ends_with_sentences(run, own, first):

    def call(*words):
        try:
            code, _, err = run(*words)
        except NonFiniteLossError as error:
            return 1, f"NonFiniteLossError: {error}"
        return code, err

    endings = []
    for seed in range(first, first + 20):
        ending, wrong, said = attempt(seed, call)
        assert wrong is None, f"{wrong}: {said}"
        endings.append(ending)
    assert {"ran", "refused"} <= set(endings)


@pytest.mark.parametrize(
    ("code", "err", "wrong"),
    [
        (0, "", None),
        (2, "run.yaml:3:5: optimizer.lr: must be greater than 0, got 0\n", None),
        (2, "command line 'batch=0': batch: must be at least 1\n", None),
        (2, "batch is wrong\n", "code 2"),
        (2, "run.yaml:3:5: batch: wrong\nand more\n", "code 2"),
        (2, "", "code 2"),
        (1, "ValueError: no", "code 1"),
        (0, "Traceback (most recent call last):", "a traceback"),
    ],
)
def test_the_judge(code, err, wrong):
    assert judge(code, err) == wrong
