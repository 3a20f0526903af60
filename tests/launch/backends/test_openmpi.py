"""The words of Open MPI's mpiexec."""

import os

import pytest
from dbrdist_launch.backends import hydra, openmpi
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.backends.mpi import Starter

HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


FULL = Job(("x",), 3, HOSTS, ("PATH", "A"), "core", "/s", ("-o", "K=v"), "eth0", ("-z",))


def made(family, version="5.0.1"):
    return {"mpich": hydra.Hydra, "openmpi": openmpi.OpenMPI}[family](Starter(family, version, "/m"))


@pytest.mark.parametrize("version", ["4.1.4", "5.0.1", "6.0"])
@pytest.mark.parametrize("user", [0, 1000])
def test_words_of_open_mpi(monkeypatch, version, user):
    monkeypatch.setattr(os, "getuid", lambda: user)
    one, new = made("openmpi", version), version > "5"
    first = ["/m", "-n", "3", *(["--allow-run-as-root"] if user == 0 else [])]
    beyond = ["--map-by", ":OVERSUBSCRIBE"] if new else ["--oversubscribe"]
    more = ["--bind-to", "core", "--mca", "btl_tcp_if_include", "eth0", "-z", "p"]
    spread = ["--host", "a:2,b:1", "-x", "PATH", "-x", "A"]
    assert one.command(ALONE, ["p"]) == [*first, *beyond, "--bind-to", "none", "p"]
    assert one.command(SPREAD, ["p"]) == [*first, *spread, "--bind-to", "none", "p"]
    assert one.command(FULL, ["p"]) == [*first, *spread, *more]
    assert one.command(FULL._replace(hosts=()), ["p"]) == [*first, *beyond, *more]
    name = "PRTE_MCA_plm_ssh_agent" if new else "OMPI_MCA_plm_rsh_agent"
    assert one.environment(FULL) == {name: "/s -o K=v"} and one.environment(SPREAD) == {}
    assert one.environment(FULL._replace(ssh=None)) == {name: "ssh -o K=v"}
    assert one.environment(FULL._replace(ssh_options=())) == {name: "/s"}
    assert one.environment(FULL._replace(hosts=())) == {}
