"""Loader processes of these tests are forks of a process that has imported everything."""

import functools
import inspect
import linecache
from types import CodeType

import pytest

from dbrdist.datasets.loading import workers
from tests import warm


def last_line(code: CodeType) -> int:
    """The last line of a function and of those inside it."""
    inside = (last_line(c) for c in code.co_consts if isinstance(c, CodeType))
    return max(*(line or 0 for _, _, line in code.co_lines()), *inside, code.co_firstlineno)


@functools.cache
def looks_at_workers(code: CodeType) -> bool:
    """Whether a test kills its workers or asks for their numbers; inspect.getsource would parse each of the tests."""
    source = "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last_line(code)])
    return ".pids" in source or "kill" in source


@pytest.fixture(autouse=True)
def warm_workers(request, monkeypatch):
    """A tenth of a second less for each worker; not where a test kills or looks at them, since what it then has in its
    hands is the client of a fork, which ends a moment before the fork does."""
    if not looks_at_workers(inspect.unwrap(request.function).__code__):
        monkeypatch.setattr(workers, "_python", warm.python)
