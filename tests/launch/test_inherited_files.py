"""How many files a process may open: as many as may be for the launcher, and as before for programs."""

import resource

import pytest
from dbrdist_launch.inherited import Inherited

NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture
def limit(monkeypatch):
    """Makes the limits of open files those given; (what was set, whether setting fails)."""
    asked = []

    def make(soft, hard, error=None):
        def set_limit(kind, values):
            assert kind == resource.RLIMIT_NOFILE
            if error is not None:
                raise error
            asked.append(values)

        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        return asked

    return make


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (1024, 4096, 4096), (1024, 65535, 65535), (1024, 65536, 65536), (1024, 65537, 65536), (1024, NO_LIMIT, 65536),
        (65536, NO_LIMIT, None), (65537, 1 << 20, None), (4096, 4096, None), (NO_LIMIT, NO_LIMIT, None),
    ],
)  # fmt: skip
def test_a_launcher_opens_as_many_files_as_may_be(limit, soft, hard, most):
    asked = limit(soft, hard)
    one = Inherited()
    one.widen()
    assert asked == ([(most, hard)] if most else []) and one.raised == ([soft, most] if most else [])
    assert one.files == (soft, hard)


@pytest.mark.parametrize("error", [OSError(), ValueError()])
def test_a_limit_that_cannot_be_raised_stays(limit, error):
    limit(1024, 4096, error)
    one = Inherited()
    one.widen()
    assert one.raised == []


def test_the_limit_that_the_launcher_raised_is_taken_back_where_it_came_through(limit):
    limit(4096, 8192)
    one = Inherited()
    for raised, files in (([], (4096, 8192)), ([1024, 2048], (4096, 8192)), ([1024, 4096], (1024, 8192))):
        one.was_raised(raised)
        assert one.files == files
