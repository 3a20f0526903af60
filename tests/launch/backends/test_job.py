"""A plain job."""

from dbrdist_launch.backends.job import Host, Job

HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


def test_a_plain_job():
    assert Job(("x",), 3, (), (), "none", None, (), None, ()) == ALONE and Host("a") == Host("a", 1)
