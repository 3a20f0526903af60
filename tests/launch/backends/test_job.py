"""A plain job, and who says where its input goes."""

import types

import pytest
from dbrdist_launch.backends.job import Host, Job, goes_to_rank_0

HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


def test_a_plain_job():
    assert Job(("x",), 3, (), (), "none", None, (), None, ()) == ALONE and Host("a") == Host("a", 1)


@pytest.mark.parametrize(
    ("identity", "words", "yes"),
    [
        ("hydra", (), True),
        ("hydra", ("-s", "all"), False),
        ("openmpi", ("--mca", "-s"), True),
        ("openmpi", ("--stdin", "1"), False),
        ("openmpi", ("-stdin=all",), False),
        ("srun", (), False),
    ],
)
def test_who_says_which_ranks_get_the_input(identity, words, yes):
    backend = types.SimpleNamespace(identity=identity, places_ranks=identity == "srun")
    assert goes_to_rank_0(backend, words) == yes
