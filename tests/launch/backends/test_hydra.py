"""The words of Hydra, MPICH's mpiexec."""

import pytest
from dbrdist_launch.backends import hydra, openmpi
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.backends.mpi import Starter

HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


FULL = Job(("x",), 3, HOSTS, ("PATH", "A"), "core", "/s", ("-o", "K=v"), "eth0", ("-z",))


def made(family, version="5.0.1"):
    return {"mpich": hydra.Hydra, "openmpi": openmpi.OpenMPI}[family](Starter(family, version, "/m"))


@pytest.mark.parametrize(
    ("job", "words", "environment"),
    [
        (ALONE, "", {}), (SPREAD, "-hosts a:2,b:1 -launcher ssh -genvlist PATH,A", {"DBRDIST_LAUNCH_LAST": "1"}),
        (SPREAD._replace(forward=()), "-hosts a:2,b:1 -launcher ssh -genvnone", {"DBRDIST_LAUNCH_LAST": "1"}),
        (FULL, "-hosts a:2,b:1 -launcher ssh -launcher-exec /s -genvlist PATH,A -iface eth0 -bind-to core -z",
         {"HYDRA_LAUNCHER_EXTRA_ARGS": "-o K=v", "DBRDIST_LAUNCH_LAST": "1"}),
        (FULL._replace(hosts=()), "-iface eth0 -bind-to core -z", {}),
    ],
)  # fmt: skip
def test_words_of_hydra(job, words, environment):
    one = made("mpich")
    assert one.command(job, ["p", "q"]) == ["/m", "-n", "3", *words.split(), "p", "q"]
    assert one.environment(job) == environment and list(one.environment(job))[-1:] in ([], ["DBRDIST_LAUNCH_LAST"])
