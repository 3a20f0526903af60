"""Loader processes of these tests are forks of a process that has imported everything."""

import inspect

import pytest

from dbrdist.datasets import workers
from tests import warm


@pytest.fixture(autouse=True)
def warm_workers(request, monkeypatch):
    """A tenth of a second less for each worker; not where a test kills or looks at them, since what it then has in its
    hands is the client of a fork, which ends a moment before the fork does."""
    source = inspect.getsource(request.function)
    if ".pids" not in source and "kill" not in source:
        monkeypatch.setattr(workers, "_python", warm.python)
