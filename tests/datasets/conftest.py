"""Loader processes of these tests are forks of a process that has imported everything."""

import pytest

from dbrdist.datasets import workers
from tests import warm


@pytest.fixture(autouse=True)
def warm_workers(monkeypatch):
    """A tenth of a second less for each worker."""
    monkeypatch.setattr(workers, "_python", warm.python)
