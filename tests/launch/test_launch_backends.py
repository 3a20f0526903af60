"""Each starter's exact words and nature, and the report of a failure from end to end."""

import os
import signal
import sys

import pytest
from dbrdist_launch import backends
from dbrdist_launch.backends import flux, hydra, mpi, openmpi, slurm
from dbrdist_launch.backends.job import Host, Job, Place
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.errors import LaunchError, place_of
from dbrdist_launch.identity import of_environment
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.judgement.report import Failure, as_text
from dbrdist_launch.launcher.running.plan import LaunchPlan, Outcome
from dbrdist_launch.launcher.streams.output import Piece

HOSTS = (Host("a", 2), Host("b", 1))
ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))
FULL = Job(("x",), 3, HOSTS, ("PATH", "A"), "core", "/s", ("-o", "K=v"), "eth0", ("-z",))


def made(family, version="5.0.1"):
    return {"mpich": hydra.Hydra, "openmpi": openmpi.OpenMPI}[family](Starter(family, version, "/m"))


def test_a_plain_job():
    assert Job(("x",), 3, (), (), "none", None, (), None, ()) == ALONE and Host("a") == Host("a", 1)


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


@pytest.mark.parametrize(
    ("bind", "words"), [("none", []), ("core", ["--cpu-bind=cores"]), ("numa", ["--cpu-bind=ldoms"])]
)
def test_words_of_srun(monkeypatch, bind, words):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    monkeypatch.delenv("OMPI_MCA_mpi_abort_delay", raising=False)
    pmi, pmix = slurm.Srun("pmi2"), slurm.Srun("pmix_v4")
    last = ["--kill-on-bad-exit=0", "--export"]
    alone = ALONE._replace(bind=bind)
    assert pmi.command(alone, ["p"]) == ["srun", "--mpi=pmi2", "-n", "3", *words, *last, "NONE", "p"]
    nodes = ["-N", "2", "--nodelist", "a,b"]
    spread = SPREAD._replace(bind=bind, extra=("-z",))
    assert pmi.command(spread, ["p"]) == ["srun", "--mpi=pmi2", "-n", "3", *nodes, *words, *last, "PATH,A", "-z", "p"]
    even = spread._replace(hosts=(Host("a", 2), Host("b", 2)), forward=())
    names = "PMIX_MCA_psec,OMPI_MCA_mpi_abort_delay"
    assert pmix.command(even, ["p"]) == [
        "srun", "--mpi=pmix_v4", "-n", "3", *nodes, "--ntasks-per-node", "2", *words, *last, names, "-z", "p",
    ]  # fmt: skip
    assert pmi.environment(spread) == {}
    assert pmix.environment(spread) == {"PMIX_MCA_psec": "native", "OMPI_MCA_mpi_abort_delay": "1"}
    monkeypatch.setenv("OMPI_MCA_mpi_abort_delay", "7")
    assert pmix.environment(spread)["OMPI_MCA_mpi_abort_delay"] == "7"
    assert pmix.label == "srun --mpi=pmix_v4" and pmi.hosts({}) == ()


@pytest.mark.parametrize(("bind", "affinity"), [("none", "off"), ("core", "per-task"), ("numa", "per-task")])
def test_words_of_flux(monkeypatch, bind, affinity):
    monkeypatch.setattr(flux.shutil, "which", lambda name: f"/bin/{name}")
    first, last = ["/bin/flux", "run", "-n", "3"], ["-o", f"cpu-affinity={affinity}"]
    assert flux.Flux().command(ALONE._replace(bind=bind), ["p"]) == [*first, "--env=-*", *last, "p"]
    placed = ["-N", "2", "--requires", "host:a,b", "--env=-*", "--env=PATH", "--env=A"]
    spread = SPREAD._replace(bind=bind, extra=("-z",))
    assert flux.Flux(True).command(spread, ["p"]) == [*first, *placed, *last, "-o", "pmi=pmix", "-z", "p"]
    assert flux.Flux().environment(spread) == {} and flux.Flux().hosts({}) == ()


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


def test_what_slurm_gives_is_read_or_refused():
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]"}
    one, two = (Host("n1", 1), Host("n2", 1), Host("n3", 1)), (Host("n1", 2), Host("n2", 1), Host("n3", 1))
    for environment, found in (
        (inside, one),
        ({**inside, "SLURM_TASKS_PER_NODE": "2,1(x2)"}, two),
        ({**inside, "SLURM_JOB_CPUS_PER_NODE": "2,1"}, two),
        ({"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n[1-3]"}, one),
        ({"SLURM_JOB_NODELIST": "n1"}, ()),
        ({"SLURM_JOB_ID": "1"}, ()),
    ):
        assert slurm.allocation(environment) == found
    with pytest.raises(LaunchError, match=r"give 'odd' as the tasks of each node; expected a form such as 2\(x3\),1"):
        slurm.allocation({**inside, "SLURM_TASKS_PER_NODE": "odd"})


@pytest.mark.parametrize(
    ("asked", "library", "mpiexec", "environment", "found"),
    [
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1"}, "pmi2"),
        ("auto", "openmpi", None, {"SLURM_JOB_ID": "1"}, "pmix"),
        ("auto", "mpich", None, {}, None),
        ("auto", None, None, {"SLURM_JOB_ID": "1"}, None),
        ("auto", "mpich", "/m", {"SLURM_JOB_ID": "1"}, None),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, None),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "batch"}, "pmi2"),
        ("auto", "mpich", None, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967291"}, "pmi2"),
        ("srun", None, None, {}, "pmi2"),
        ("srun", "openmpi", "/m", {}, "pmix"),
        ("srun-pmix", "openmpi", None, {}, "pmix"),
        ("srun-pmi2", None, None, {}, "pmi2"),
    ],
)
def test_where_srun_is_taken(monkeypatch, asked, library, mpiexec, environment, found):
    monkeypatch.setattr(slurm, "plugins", lambda: ["none", "pmi2", "pmix_v4"])
    place = Place(asked, None, Library(library, "5") if library else None, mpiexec, environment)
    assert slurm.choose(place) == (slurm.Srun(found) if found else None)
    monkeypatch.setattr(slurm, "plugins", lambda: ["none"])
    if asked == "auto":
        assert slurm.choose(place) is None
    else:
        with pytest.raises(
            LaunchError, match=f"--backend {asked}: this srun supports none, but the program needs {found}"
        ):
            slurm.choose(place)


# ---- reports --------------------------------------------------------------------------------------------------------


def test_a_report_from_end_to_end():
    failure = Failure("exit", 1, "b", 3, "exit code 3; see its log", step=7, seconds=12.34, last_beat_seconds=0.26)
    failure.last_words, failure.ranks_lost = ["last", "words"], [1, 3]
    failure.others = [
        {"rank": 0, "host": "a", "doing": "running", "stacks": "Thread 1\n  File x"},
        {"rank": 2, "host": "a", "doing": "stopped"},
    ]
    assert as_text(failure).splitlines() == [
        "dbrdist-launch: rank 1 on b failed first (exit): exit code 3;",
        "    see its log",
        "  12.3 s after the start, exit code 3, step 7, last heartbeat 0.3 s before",
        "  ranks lost with it: 1 3",
        "  its last lines on stderr:",
        "    last",
        "    words",
        "  the other ranks at that time:",
        "    rank 0 on a: running",
        "      Thread 1",
        "        File x",
        "    rank 2 on a: stopped",
    ]


@pytest.mark.parametrize(("host", "who"), [("b", "b"), (None, "the job")])
def test_a_report_of_no_single_rank(host, who):
    assert as_text(Failure("start", None, host, 71, "late")).splitlines() == [
        f"dbrdist-launch: {who} failed first (start): late", "  0.0 s after the start, exit code 71",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, 32, 33, 40])
def test_others_are_shown_up_to_32(number):
    failure = Failure("exit", 1, "a", 1, "m")
    failure.others = [{"rank": n, "host": "b", "doing": "waits"} for n in range(number)]
    lines = as_text(failure).splitlines()[2:]
    shown = [f"    rank {n} on b: waits" for n in range(min(number, 32))]
    more = [f"    and {number - 32} more (see status.json)"] if number > 32 else []
    assert lines == [*(["  the other ranks at that time:"] if number else []), *shown, *more]


def test_what_is_not_known_yet():
    assert vars(Outcome(3)) == {
        "code": 3, "failure": None, "asked": 0, "steps": -1, "seconds": 0.0, "first_rank_seconds": None,
        "started_at": 0.0,
    }  # fmt: skip
    assert vars(Failure("exit", 1, "a", 3, "m")) == {
        "kind": "exit", "rank": 1, "host": "a", "code": 3, "message": "m", "signal": None, "step": None, "seconds": 0.0,
        "traceback": None, "last_words": [], "last_beat_seconds": None, "ranks_lost": [], "others": [],
        "may_retry": False, "host_trouble": False,
    }  # fmt: skip
    known = vars(Rank(1, "a", None))
    assert known.pop("heard_at") > 0 and known.pop("channel") is None
    assert known == {
        "rank": 1, "host": "a", "local_rank": 0, "pid": 0, "pinged": False, "state": "", "traced": False,
        "stopped_since": None, "count": 0, "step": -1, "beat_at": None, "paused": False, "fields": {},
        "tails": {"out": b"", "err": b""}, "owed": 0, "spoke_last": "out", "events": [], "connected": True,
        "ended": None, "early_exit": None, "aborting_at": None, "lost_at": None, "cut": False, "leaving": False,
        "left_at": None, "exit": None, "stacks": None, "warned": set(), "written": 0, "sources": {}, "broken": None,
        "orphaned": None, "cut_at": None, "welcomed": False,
    }  # fmt: skip
    piece = Piece(0, "a", "out", b"x")
    assert (piece.urgent, piece.left) == (False, 0) and piece != Piece(0, "a", "out", b"x")
    plan = LaunchPlan(ALONE, ["/m"], {}, {}, None, None, "t")
    assert (plan.control, plan.addresses, plan.deadline) == (None, (), None)


def test_the_place_of_an_error_is_where_it_was_raised():
    def inner():
        raise ValueError("odd")

    try:
        inner()
    except ValueError as error:
        assert place_of(error) == f"{__file__}:{inner.__code__.co_firstlineno + 1}"
    assert place_of(ValueError("never raised")) == "?"
    assert LaunchError("no").code == 2 and str(LaunchError("no", 71)) == "no" and LaunchError("no", 71).code == 71


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
    assert list(known) == ["srun", "flux", "mine", "openmpi", "hydra"]
    monkeypatch.setattr(backends, "_KNOWN", known)
    monkeypatch.setattr(backends, "_ASKED", {name: one.NAMES[0] for one in backends._found() for name in one.NAMES})
    made = backends.choose(Place("mine-fast"))
    assert made.command(Job(("x",), 2), ["p"])[:3] == ["/mine", "-n", "2"]
    variables = {"MINE_RANK": "1", "MINE_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "9"}
    assert of_environment(made.identity, variables)[:4] == (1, 2, 0, 0)
    monkeypatch.setattr(backends, "_ASKED", {})
    with pytest.raises(LaunchError, match="--backend 'mine'"):
        backends.choose(Place("mine"))
