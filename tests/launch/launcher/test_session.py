"""What the launcher makes of its settings: hosts, ranks, addresses and words, and when it goes on after a failure."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits
from dbrdist_launch.backends import choose, flux, hosts, mpi, slurm
from dbrdist_launch.backends.hydra import Hydra
from dbrdist_launch.backends.job import Host, Job, Place
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.backends.openmpi import OpenMPI
from dbrdist_launch.backends.slurm import Srun
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.identity import of_environment, repeated
from dbrdist_launch.launcher import session as sessions
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.preparation.settings import LaunchSettings
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.records.jobs import JobFolder
from dbrdist_launch.launcher.restarting import pool as pools
from dbrdist_launch.launcher.restarting import requeue as requeueing
from dbrdist_launch.launcher.restarting.pool import HostPool
from dbrdist_launch.launcher.restarting.requeue import requeue
from dbrdist_launch.launcher.running.plan import Outcome
from dbrdist_launch.launcher.session import Session, parse_ranks
from dbrdist_launch.launcher.streams.input import KeptInput

HYDRA = Hydra(Starter("mpich", "5.0.2", "/m"))
PAIR = (Host("a", 2), Host("b", 3))


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Hosts a, b, c are elsewhere, `here` is this machine; nothing is asked of the network."""
    known = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3", "here": "127.0.0.1"}
    monkeypatch.setattr(hosts, "resolve", known.get)
    monkeypatch.setattr(hosts, "is_local", lambda name: name == "here")
    for name in ("SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def session(backend=HYDRA, found=(), **values):
    """A session whose program and backend are known."""
    made = Session.__new__(Session)
    made.settings = LaunchSettings(("python", "x.py"), **values)
    made.program = SimpleNamespace(command=("/usr/bin/python", "x.py"), interpreter=None)
    made.backend, made.hosts, made.folder, made.deadline, made.notes = backend, found, None, None, []
    made.kept_input = KeptInput()
    made.added, made.named, made.shown = {"A": "1"}, [], None
    return made


# ---- which hosts ----------------------------------------------------------------------------------------------------


def test_hosts_come_from_one_place(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("c 4 user=joe\n")
    path = str(tmp_path / "hosts")
    assert session(hosts="a:2,b:3")._hosts() == PAIR
    by_file = session(hostfile=path)
    assert by_file._hosts() == (Host("c", 4),) and "user=joe not used here" in by_file.notes[0]
    with pytest.raises(LaunchError, match="cannot be combined"):
        session(hosts="a", hostfile=path)._hosts()
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho a:2\necho\necho b:3\n")
    script.chmod(0o755)
    assert session(host_discovery=str(script))._hosts() == PAIR
    monkeypatch.setenv("LSB_MCPU_HOSTS", "b 3")
    assert session()._hosts() == (Host("b", 3),) and session(Srun("pmi2"))._hosts() == ()


@pytest.mark.parametrize(("text", "said"), [("exit 3", "ended with exit code 3: why"), ("exit 0", "")])
def test_a_script_that_names_no_hosts_leaves_those_known(tmp_path, text, said):
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho why >&2\n{text}\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot be run: "):
        HostPool(PAIR, lambda _: {}, 0.0, str(tmp_path / "nowhere")).discover()
    pool = HostPool(PAIR, lambda _: {}, 0.0, str(script))
    if said:
        with pytest.raises(LaunchError, match=said):
            pool.discover()
    else:
        pool.discover()
    assert pool.hosts == PAIR


def test_hosts_without_an_address_are_refused_where_we_reach_them_ourselves(monkeypatch):
    asked = []

    for name, is_known in (("b", True), ("nowhere", False), ("elsewhere", False)):
        answer = SimpleNamespace(stdout=f"user u\nhostname {name}\nlone\n")
        monkeypatch.setattr(
            sessions.subprocess, "run", lambda words, answer=answer, **options: asked.append(words) or answer
        )
        assert session()._ssh_knows("nowhere") == is_known
        assert session(Srun("pmi2"))._check_host(Host("nowhere")) is None
        if is_known:
            session()._check_host(Host("nowhere"))
        else:
            with pytest.raises(LaunchError, match="unknown host 'nowhere'"):
                session()._check_host(Host("nowhere"))
    assert asked[0] == ["ssh", "-G", "nowhere"]
    asked.clear()
    session()._check_host(Host("a"))
    assert asked == []
    session(ssh="/s")._ssh_knows("a")
    assert asked == [["/s", "-G", "a"]]
    for error in (OSError("none"), subprocess.TimeoutExpired("ssh", 5)):
        monkeypatch.setattr(sessions.subprocess, "run", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
        assert not session()._ssh_knows("nowhere")


def test_a_session_reads_its_settings(monkeypatch):
    """Which library, which ranks are shown, what travels over the side channel, and when the time is over."""
    asked = []
    monkeypatch.setattr(sessions, "resolve", lambda words: asked.append(words) or program)
    monkeypatch.setattr(sessions.mpi, "library_of", lambda interpreter: Library("mpich", "5", interpreter))
    monkeypatch.setattr(sessions, "mpi_of_binary", {"/bin/solver": "intel"}.get)
    monkeypatch.setattr(sessions.backends, "choose", lambda place: asked.append(place) or HYDRA)
    monkeypatch.setattr(sessions.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(sessions.os, "environ", {"V": "1", "W_A": "2", "PATH": "p"})
    for command, interpreter, library in (
        ("/bin/python", "/bin/python", Library("mpich", "5", "/bin/python")),
        ("/bin/solver", None, Library("intel", "")),
        ("/bin/other", None, None),
    ):
        program = SimpleNamespace(command=(command,), interpreter=interpreter)
        made = Session(LaunchSettings(("x",), env=("V", "W_*", "N=3"), mpiexec="/m"))
        assert made.library == library and asked[-1] == Place("auto", interpreter, library, "/m")
        assert (made.added, made.named) == ({"N": "3", "V": "1"}, ["V", "W_*"])
        assert made.hosts == () and made.deadline is None and made.shown is None
    for values, shown in (({"quiet": True}, {0}), ({"quiet": True, "show": "1"}, {1}), ({"show": "2"}, {2})):
        assert Session(LaunchSettings(("x",), **values)).shown == shown
    assert Session(LaunchSettings(("x",), timeout=5.0)).deadline == 1005.0
    with pytest.raises(LaunchError, match="unknown host 'nowhere'"):
        Session(LaunchSettings(("x",), hosts="a,nowhere", ssh="/nowhere/ssh"))


# ---- addresses ------------------------------------------------------------------------------------------------------


class Probe:
    """A datagram socket of a machine that has 127.0.0.1, 10.0.0.9 and fd00::9."""

    def __init__(self, family, kind):
        self.family = family

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def _check(self, address):
        if (self.family == hosts.socket.AF_INET6) != (":" in address):
            raise OSError("address family not supported")

    def bind(self, to):
        self._check(to[0])
        if to[0] not in ("127.0.0.1", "10.0.0.9", "fd00::9"):
            raise OSError("cannot assign requested address")

    def connect(self, to):
        self._check(to[0])
        if to[0] == "10.9.9.9":
            raise OSError("network is unreachable")

    def getsockname(self):
        return ("fd00::9", 1, 0, 0) if self.family == hosts.socket.AF_INET6 else ("10.0.0.9", 1)


def test_own_addresses_by_family(monkeypatch):
    monkeypatch.undo()
    known = {"four": "10.0.0.9", "six": "fd00::9", "far4": "10.0.0.1", "far6": "fd00::1", "cut": "10.9.9.9"}
    monkeypatch.setattr(hosts, "resolve", known.get)
    monkeypatch.setattr(hosts.socket, "socket", Probe)
    names = ("localhost", os.uname().nodename, *known, "nowhere")
    assert [name for name in names if hosts.is_local(name)] == ["localhost", os.uname().nodename, "four", "six"]
    towards = {name: hosts.own_address_towards(name) for name in ("far4", "far6", "cut", "nowhere")}
    assert towards == {"far4": "10.0.0.9", "far6": "fd00::9", "cut": None, "nowhere": None}


def test_addresses_of_interfaces():
    assert [hosts.address_of_interface(text) for text in ("10.1.2.3", "fd00::1")] == ["10.1.2.3", "fd00::1"]
    assert hosts.address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"--interface 'e.th0': .*interfaces of this host: .*lo"):
        hosts.address_of_interface("e.th0")


def test_ranks_find_us_on_the_way_that_leads_to_them(monkeypatch):
    monkeypatch.setattr(hosts, "own_address_towards", {"a": "10.0.0.9", "b": "10.0.0.9", "c": "fd00::9"}.get)
    monkeypatch.setattr(hosts, "own_addresses", lambda: ("10.0.0.9", "127.0.0.1"))

    def on(*names, backend=HYDRA, **values):
        return session(backend, **values).addresses(Job(("x",), 2, tuple(map(Host, names))))

    assert on() == on("here") == () and on(port=7) == on("here", port=7) == ("127.0.0.1",)
    assert on(backend=Srun("pmi2")) == ("10.0.0.9", "127.0.0.1")
    assert on("here", backend=Srun("pmi2")) == ("127.0.0.1",)
    assert on("a", "b") == on("a", "here") == ("10.0.0.9",) and on("a", "c") == ("10.0.0.9", "fd00::9")
    assert on("nowhere") == (os.uname().nodename,)
    assert on("a", interface="10.4.4.4") == ("10.4.4.4",)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c")
    assert on(backend=Srun("pmi2")) == ("fd00::9",)


# ---- the job --------------------------------------------------------------------------------------------------------


def test_the_number_of_ranks(monkeypatch):
    def ranks(available=(), backend=HYDRA, **values):
        job = session(backend, **values).job(available)
        return job.ranks, [tuple(host) for host in job.hosts]

    with pytest.raises(LaunchError, match="expected the number of ranks"):
        ranks()
    for number, found in (("3", 3), ("0", None), ("x", None), ("-1", None)):
        monkeypatch.setenv("SLURM_NTASKS", number)
        if found:
            assert ranks() == (found, []) and ranks(ranks=2) == (2, [])
        else:
            with pytest.raises(LaunchError, match="expected the number of ranks"):
                ranks()
    assert ranks(PAIR) == (5, [("a", 2), ("b", 3)]) and ranks(PAIR, ranks=3) == (3, [("a", 2), ("b", 1)])
    with pytest.raises(LaunchError, match="9 ranks do not fit"):
        ranks(PAIR, ranks=9)
    assert ranks(PAIR, ranks=9, max_restarts=1) == (5, [("a", 2), ("b", 3)])
    assert ranks(PAIR, ranks=9, max_restarts=1, per_host=4) == (8, [("a", 4), ("b", 4)])
    assert ranks(PAIR, max_restarts=1) == (5, [("a", 2), ("b", 3)])
    here = (Host("here", 2),)
    assert ranks(here) == (2, []) and ranks(here, Srun("pmi2")) == (2, [("here", 2)])
    assert ranks((*here, Host("a"))) == (3, [("here", 2), ("a", 1)]) and ranks((Host("a"),)) == (1, [("a", 1)])


@pytest.mark.parametrize("bare", [True, False])
def test_variables_that_the_starter_passes_on(bare):
    forward = session(bare=bare, ranks=2, only_env=True).job(()).forward
    assert ("A" in forward, sessions.TOKEN in forward, sessions.ADDRESS in forward) == (bare, not bare, not bare)


def test_no_binding_where_ranks_outnumber_cores(monkeypatch):
    monkeypatch.setattr(sessions.cores, "available_cores", lambda: 4)
    made = session(bind="core")
    assert [made._binding(ranks, ()) for ranks in (4, 5)] == ["core", "none"]
    assert made._binding(10, (Host("a", 9),)) == "core"  # its cores are not known here


@pytest.mark.parametrize(
    ("values", "agent", "options"),
    [
        ({}, None, ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")),
        ({"ssh_option": ("Port=2",)}, None, ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "Port=2")),
        ({"ssh": "/s", "ssh_option": ("Port=2",)}, "/s", ("-o", "Port=2")),
        ({"ssh": "/s"}, "/s", ()),
    ],
)
def test_our_own_options_are_for_ssh_alone(values, agent, options):
    made = session(ranks=2, **values)
    assert made._ssh() == (agent, options)
    made.folder = SimpleNamespace(ssh_with=None)  # a script is written for options with spaces only
    assert made._ssh() == (agent, options)


def test_words_of_the_starter():
    job = Job(("x",), 2)
    assert session(bare=True).words(job) == ["/m", "-n", "2", "/usr/bin/python", "x.py"]
    words = session().words(job)
    assert words[:3] == ["/m", "-n", "2"] and words[4:6] == ["-I", "-S"]
    assert words[6].endswith("dbrdist_launch/rank/main.py") and words[7:] == ["hydra", "-", "/usr/bin/python", "x.py"]


def test_the_time_of_a_start():
    job = Job(("x",), 2)

    def start(backend=HYDRA, **values):
        return session(backend, **values).plan(job, 3, "t").start_seconds

    assert start() == limits.START_SECONDS and start(Srun("pmi2")) is None
    assert start(start_timeout=0.0) == 0.0 == start(Srun("pmi2"), start_timeout=0.0)
    made = session()
    plan = made.plan(job, 3, "t")
    assert plan.rank_environment == {"A": "1", "DBRDIST_RESTART": "3"} and plan.control is None
    made.folder = SimpleNamespace(socket="/s")
    assert made.plan(job, 3, "t").control == "/s"


@pytest.mark.parametrize("is_printed", [True, False])
def test_print_and_bare_come_before_everything_else(monkeypatch, capsys, is_printed):
    ran = []
    monkeypatch.setattr(sessions.os, "execvpe", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(
        sessions.binding,
        "lines",
        lambda job, backend, gpu_each: [f"# each {gpu_each}"] * (job.ranks > 1) * (backend is HYDRA),
    )
    monkeypatch.setattr(sessions.cores, "available_cores", lambda: 2)
    for values, said in (
        ({"ranks": 3, "bind": "core"}, ["# not bound: there are more ranks than cores here", "# each False"]),
        ({"ranks": 2, "bind": "core", "gpus": "rank"}, ["# each True"]),
    ):
        made = session(bare=not is_printed, print=is_printed, **values)
        assert (made.run() == 0) == is_printed
        shown = capsys.readouterr()
        if is_printed:
            assert shown.out.startswith(f"/m -n {values['ranks']} ") and shown.err.splitlines() == said
        else:
            ((path, words, environment),) = ran
            assert path == words[0] == "/m" and words[-2:] == ["/usr/bin/python", "x.py"] and environment["A"] == "1"
            ran.clear()


@pytest.mark.parametrize(
    ("view", "terminals", "is_live"),
    [(None, (1, 2), True), (None, (1,), False), (None, (2,), False), (True, (), True), (False, (1, 2), False)],
)
def test_the_live_view_is_for_terminals_and_for_those_who_ask(monkeypatch, view, terminals, is_live):
    monkeypatch.setattr(sessions.os, "isatty", terminals.__contains__)
    made = []

    def output(shown, folder, view, timestamps, tee, log_bytes, logs_kept):
        made.append((shown, folder, view, timestamps, tee, log_bytes, logs_kept))
        return SimpleNamespace(note=made.append, flush=lambda: made.append("flush"), close=lambda: made.append("close"))

    monkeypatch.setattr(sessions, "Output", output)
    monkeypatch.setenv("TERM", "xterm")
    one = session(ranks=2, view=view, tee="t", name="mine", log_size="2k")
    one._attempts = lambda job, output, run: run.say("words") or 1 // (job.ranks != 2 or not hasattr(output, "flush"))
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert made == [(None, None, is_live, False, "t", 2048, 3), "dbrdist-launch: words", "flush", "close"]


@pytest.mark.parametrize("problem", [None, "--events 'e' cannot be written: why"])
@pytest.mark.parametrize("metrics", [None, "9000"])
def test_a_job_is_told_to_its_events_and_metrics_from_beginning_to_end(monkeypatch, problem, metrics):
    happened = []

    class Events:
        def __init__(self, path, job):
            happened.append(("events", path, job))
            self.problem = problem

        def tell(self, event, **fields):
            happened.append((event, fields))

        def close(self):
            happened.append("events close")

    def served(address, job):
        happened.append(("metrics", address, job))
        return SimpleNamespace(close=lambda: happened.append("metrics close"))

    output = SimpleNamespace(
        note=happened.append, flush=lambda: happened.append("flush"), close=lambda: happened.append("close")
    )
    monkeypatch.setattr(sessions, "Output", lambda *words: output)
    monkeypatch.setattr(sessions, "Events", Events)
    monkeypatch.setattr("dbrdist_launch.launcher.records.metrics.Metrics", served)
    one = session(ranks=2, view=False, name="mine", events="e", metrics=metrics)
    one.metrics = None
    one._attempts = lambda job, output, run: happened.append((job.ranks, run.name)) or 7
    assert one.run() == 7
    started = {"command": ["python", "x.py"], "ranks": 2, "pid": os.getpid()}
    assert happened == [
        ("events", "e", "mine"), ("job_started", started), *[("metrics", "9000", "mine")] * (metrics is not None),
        (2, "mine"), *["metrics close"] * (metrics is not None), "events close",
        *[f"dbrdist-launch: {problem}"] * (problem is not None), "flush", "close",
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["Port=22", "ProxyCommand=nc %h %p"])
def test_an_attempt_has_a_folder_while_it_runs(tmp_path, monkeypatch, option):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seen = []

    def attempt(plan, output, settings, events):
        with open(os.path.join(made.folder.folder, "job.json")) as file:
            seen.append((plan, json.load(file)))
        return SimpleNamespace(run=lambda: 1 // 0, ranks={})

    monkeypatch.setattr(sessions, "Attempt", attempt)
    made = session(ranks=2, ssh_option=(option,))
    job = made.job(PAIR)
    with pytest.raises(ZeroDivisionError):
        made.attempt(job, None, 3, "mine")
    ((plan, told),) = seen
    assert (told["job"], told["command"]) == ("mine", list(made.settings.words))
    assert made.folder is None and plan.rank_environment["DBRDIST_RESTART"] == "3"
    assert not any(path.name == "job.json" for path in tmp_path.rglob("*"))
    if " " in option:
        assert plan.job.ssh.startswith(str(tmp_path)) and plan.job.ssh_options == ()
    else:
        assert plan.job == job


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(None, None), ("all", None), ("none", set()), ("3", {3}), ("0,4-6", {0, 4, 5, 6}), ("5-5", {5}), ("6-5", set())],
)
def test_which_ranks_are_shown(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.slow
def test_a_range_of_ranks_to_show_may_go_beyond_all_of_them():
    """999,999,999 numbers would take the memory of this machine."""
    for text in ("3-999999999", "999999998-999999999", "7,5000000"):
        assert 1 << 20 <= max(parse_ranks(text)) < 1 << 21  # not nobody: the launcher says that there is no such rank


@pytest.mark.parametrize("text", ["", "-", "1-x", "x-1", "0,", "-3", "1.5"])
def test_odd_ranks_to_show_are_refused(text):
    with pytest.raises(LaunchError, match="expected numbers and ranges"):
        parse_ranks(text)


# ---- after a failure ------------------------------------------------------------------------------------------------


class Notes:
    """An output that keeps what is said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    def shows(self, rank):
        return rank == 1

    def next_folder(self, folder):
        pass


def test_the_next_job_runs_on_the_hosts_that_are_left():
    def after(lost, aside=(), **values):
        made = session(found=PAIR, cooldown=9.0, **values)
        pool = HostPool(
            PAIR, lambda names: {name: "no route" for name in lost if name in names}, 9.0, clock=lambda: 9.0
        )
        pool.aside = dict.fromkeys(aside, (5.0, "was away"))
        notes = Notes()
        job, again, words = made._next_job(Job(("x",), 5, PAIR), pool, notes)
        return again, job.ranks, words, notes.said

    assert after([]) == (True, 5, " on a b", []) and after([], ["a"]) == (True, 5, " on a b; back again: a", [])
    aside = ["dbrdist-launch: host a is not used for 9 s: no route"]
    assert after(["a"]) == (True, 3, " on b", aside) and after(["a"], min_hosts=1)[0]
    assert after(["a"], min_hosts=2) == (False, 5, "; but too few hosts are left: 1, with --min-hosts 2", aside)
    assert after(["a", "b"], min_hosts=0)[:3] == (False, 5, "; but too few hosts are left: 0, with --min-hosts 0")
    job, notes = Job(("x",), 5), Notes()
    assert session()._next_job(job, None, notes) == (job, True, "")  # there are no hosts to ask

    def discover():
        raise LaunchError("the script failed")

    pool = HostPool(PAIR, lambda names: {}, 9.0)
    pool.discover = discover
    assert session(found=PAIR)._next_job(job, pool, notes)[1]
    assert notes.said == ["dbrdist-launch: the script failed; using the hosts known before"]


def test_a_start_that_failed_names_the_hosts_that_do_not_answer():
    def told(kind="start", hosts=PAIR, backend=HYDRA, rank=None):
        made, notes = session(backend), Notes()
        made._probe = lambda names: {"b": "no route"} if names == ["a", "b"] else {}
        failure = Failure(kind, rank, None, 71, "m", traceback="Traceback (most recent call last):\n  E")
        made._tell(Outcome(71, failure), notes, Job(("x",), 5, hosts))
        return failure.host, failure.host_trouble, failure.message

    trouble = ("b", True, "m; host b cannot be reached: no route")
    assert told() == trouble
    for values in ({"kind": "exit"}, {"hosts": ()}, {"backend": Srun("pmi2")}):
        assert told(**values) == (None, False, "m")
    notes = Notes()
    session()._tell(Outcome(0), notes, Job(("x",), 5))
    assert notes.said == []


def test_a_traceback_is_said_again_where_its_rank_is_not_shown():
    text = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\nValueError: v'
    for rank, again in ((1, False), (2, True), (None, True)):
        notes = Notes()
        session()._tell(Outcome(1, Failure("exception", rank, "a", 1, "m", traceback=text)), notes, Job(("x",), 5))
        assert ("see the traceback above" in notes.said[0]) != again


def attempts(monkeypatch, *outcomes, **values):
    """The code of a job whose attempts end like this; (restart, ranks) of each; what was said."""
    made, notes, left, run = session(**values), Notes(), list(outcomes), []

    def attempt(job, output, restart, name):
        run.append((restart, job.ranks))
        return left.pop(0)

    made.attempt, made._say_what_stays = attempt, lambda job, run: None
    kept = sessions.LaunchFolder("x", ["x"], None, None)
    kept.say = notes.said.append
    code = made._attempts(Job(("x",), 2), notes, kept)
    return code, run, [text for text in notes.said if "failed first" not in text], kept.status


def test_a_job_is_written_down_before_each_attempt_and_told_after_it(monkeypatch):
    bad = Outcome(3, Failure("exit", 1, "b", 3, "m"), steps=5, seconds=100.12345)
    good = Outcome(0, steps=9, seconds=2.0)
    made, happened, left = session(found=PAIR, max_restarts=1, backoff=7.0), [], [bad, good]

    def note(name):
        return lambda *words: happened.append((name, *words))

    def attempt(job, output, restart, name):
        happened.append(("attempt", job.ranks, restart, name))
        return left.pop(0)

    made._say_what_stays = lambda job, run: happened.append("stays")
    made.attempt, made._tell = attempt, lambda outcome, output, job: happened.append(("told", outcome.code, job.ranks))
    made._next_job = lambda job, pool, output: (job._replace(ranks=1, hosts=PAIR[:1]), True, " on a")
    made._wait = lambda outcome, seconds, output: happened.append(("wait", seconds)) or (outcome, True)
    made.events = SimpleNamespace(tell=lambda event, **fields: happened.append((event, fields)))
    made._end = lambda outcome, output, run: happened.append(("end", outcome.code)) or outcome.code
    run = SimpleNamespace(
        write=lambda: happened.append("write"), add=note("add"), name="mine", status={}, attempt_folder=lambda: "f"
    )
    output = SimpleNamespace(note=note("note"), next_folder=note("folder"))
    assert made._attempts(Job(("x",), 5, PAIR), output, run) == 0
    again = "restart 1 of 1 on a"
    assert happened == [
        "stays", "write", ("attempt", 5, 0, "mine"), ("told", 3, 5), ("add", ["a", "b"], 5, 0, bad, again),
        ("attempt_ended", {"code": 3, "seconds": 100.123, "decision": again}), ("note", f"dbrdist-launch: {again}"),
        ("wait", 7.0), ("folder", "f"),
        "write", ("attempt", 1, 1, "mine"), ("told", 0, 1), ("add", ["a"], 1, 1, good, ""),
        ("attempt_ended", {"code": 0, "seconds": 2.0, "decision": ""}), ("end", 0),
    ]  # fmt: skip
    assert run.status == {"host_failures": {"b": ["exit: m"]}}


def test_what_a_restarted_program_does_not_read_again_is_said(monkeypatch):
    bad, good = Outcome(3, Failure("exit", 1, "a", 3, "m"), steps=5, seconds=100.0), Outcome(0)
    lost = ["the first 2.0 MB", ""]
    monkeypatch.setattr(KeptInput, "rewind", lambda self: lost.pop(0))
    for words in (["the first 2.0 MB"], []):
        code, run, said, status = attempts(monkeypatch, bad, good, max_restarts=1)
        assert (code, len(run), said) == (0, 2, ["dbrdist-launch: restart 1 of 1", *words])
        assert status["host_failures"] == {}  # the job was given no hosts


def test_failures_of_hosts_are_in_the_record(monkeypatch):
    bad = Outcome(3, Failure("exit", 1, "b", 3, "m"), steps=5, seconds=100.0)
    code, _, _, status = attempts(monkeypatch, bad, found=PAIR)
    assert (code, status["host_failures"]) == (3, {"b": ["exit: m"]})


@pytest.mark.parametrize(
    ("seconds", "deadline", "asked_at", "turns"),
    [(0.0, None, None, []), (9.0, 1000.0, None, []), (9.0, None, None, [9.0, 5.0, 1.0]),
     (9.0, 1006.0, None, [6.0, 2.0]), (9.0, None, 1004.0, [9.0])],
)  # fmt: skip
def test_a_restart_is_waited_for_until_a_signal_comes(monkeypatch, seconds, deadline, asked_at, turns):
    made, happened, now = session(), [], [1000.0]
    notes = Notes()

    class Loop:
        def turn(self, left):
            happened.append(left)
            now[0] += min(left, 4.0)
            if asked_at == now[0]:
                calls[0](15)

        def close(self):
            happened.append("loop closes")

    def signals(loop, numbers, call, inherited):
        calls.append(call)
        assert set(numbers) >= {15, 2} and not notes.said  # before a word of it
        return SimpleNamespace(close=lambda: happened.append("signals close"))

    calls, told = [], []
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions, "Loop", Loop)
    monkeypatch.setattr(sessions, "Signals", signals)
    made.events = SimpleNamespace(tell=lambda event, **fields: told.append((event, fields)))
    made.deadline = deadline
    bad = Outcome(3, steps=5)
    outcome, again = made._wait(bad, seconds, notes)
    assert happened == [*turns, *["signals close", "loop closes"] * bool(turns)]
    assert told == [("waiting", {"seconds": seconds})] * bool(turns)
    said = [f"dbrdist-launch: waiting {seconds:g} s before the restart (--backoff)"] * bool(turns)
    if asked_at is None:
        assert outcome is bad and again and notes.said == said
    else:
        assert (outcome.code, outcome.asked, outcome.steps, again) == (143, 15, 5, False)
        assert notes.said == [*said, "dbrdist-launch: SIGTERM: not restarted"]


def test_no_job_has_more_than_a_million_ranks():
    assert session(ranks=1 << 20).job(()).ranks == 1 << 20
    with pytest.raises(LaunchError) as caught:
        session(ranks=(1 << 20) + 1).job(())
    assert str(caught.value) == "-n 1048577: no job has more than 1048576 ranks"


def test_attempts_are_counted_from_slurms_restarts_on(monkeypatch):
    bad = Outcome(3, Failure("exit", 1, "a", 3, "m"), steps=5, seconds=100.0)
    good = Outcome(0, steps=9)
    code, run, said, status = attempts(monkeypatch, bad, good, max_restarts=1)
    assert (code, run, said) == (0, [(0, 2), (1, 2)], ["dbrdist-launch: restart 1 of 1"])
    assert [a["restart"] for a in status["attempts"]] == [0, 1] and status["state"] == "done"
    for count, first in (("4", 4), ("x", 0), ("", 0)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        code, run, said, status = attempts(monkeypatch, bad)
        assert (code, run, status["state"]) == (3, [(first, 2)], "failed") and said == []


@pytest.mark.parametrize(
    ("outcome", "is_said"),
    [
        (Outcome(75, asked=15), True),
        (Outcome(75), False),
        (Outcome(0, asked=15), False),
        (Outcome(75, Failure("exit", 1, "a", 75, "m"), asked=15), False),
    ],
)
def test_the_end_of_a_job_says_what_was_saved_and_asked(monkeypatch, outcome, is_said):
    monkeypatch.setattr(sessions, "requeue", lambda outcome: "queued" if outcome.asked else "")
    for is_asked in (False, True):
        code, _, said, status = attempts(monkeypatch, outcome, requeue=is_asked)
        assert code == outcome.code
        assert (status["state"] == "stopped") == (bool(outcome.asked) and outcome.failure is None)
        assert ("dbrdist-launch: all ranks have saved and stopped (exit code 75)" in said) == is_said
        assert ("dbrdist-launch: queued" in said) == (is_asked and bool(outcome.asked))


@pytest.mark.parametrize(
    ("show", "ranks", "is_said"), [("0-3", 4, False), ("0,4", 4, True), ("7", 2, True), (None, 1, False)]
)
def test_ranks_to_show_that_there_are_not_are_named(show, ranks, is_said):
    made = Session(LaunchSettings(ranks=ranks, show=show, command=("true",)))
    words = []
    made._say_what_stays(made.job(()), SimpleNamespace(say=words.append))
    assert words == [f"--show-ranks {show}: the job has no rank above {ranks - 1}"] * is_said


def test_hidden_secrets_are_named_where_ranks_are_elsewhere(monkeypatch):
    monkeypatch.setattr(sessions.os, "environ", {"MY_TOKEN": "s"})

    def said(job, backend=HYDRA, added=()):
        made, words = session(backend), []
        made.notes, made.added = ["note"], dict.fromkeys(added, "")
        made._say_what_stays(job, SimpleNamespace(say=words.append))
        return words

    hidden = "not passed on, because they look like secrets: MY_TOKEN (--env NAME passes one)"
    assert said(Job(("x",), 2)) == ["note"] and said(Job(("x",), 5, PAIR)) == ["note", hidden]
    assert said(Job(("x",), 2), Srun("pmi2")) == ["note", hidden]
    assert said(Job(("x",), 5, PAIR, ("MY_TOKEN",))) == ["note"] == said(Job(("x",), 5, PAIR), added=["MY_TOKEN"])


# ---- starters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "environment", "mpiexec", "has_flux", "is_taken"),
    [
        ("flux", {}, None, False, True),
        ("flux", {"FLUX_TASK_RANK": "0"}, "/m", False, True),
        ("auto", {"FLUX_URI": "u"}, None, True, True),
        ("auto", {"FLUX_URI": "u"}, "/m", True, False),
        ("auto", {"FLUX_URI": "u"}, None, False, False),
        ("auto", {"FLUX_URI": "u", "FLUX_TASK_RANK": "0"}, None, True, False),
        ("auto", {}, None, True, False),
    ],
)
def test_flux_is_chosen_within_an_instance(monkeypatch, asked, environment, mpiexec, has_flux, is_taken):
    monkeypatch.setattr(flux.shutil, "which", lambda name: "/bin/flux" if has_flux else None)
    for library in (None, Library("mpich", "5"), Library("openmpi", "5")):
        found = flux.choose(Place(asked, None, library, mpiexec, environment))
        assert (found is not None) == is_taken
        assert found is None or found.pmix == (library is not None and library.family == "openmpi")
    words = flux.Flux().command(Job(("x",), 5, PAIR, bind="core"), ["p"])
    text = "run -n 5 -N 2 --requires host:a,b --env=-* -o cpu-affinity=per-task p"
    assert words[1:] == text.split()


def test_a_starter_is_found_or_none_fits(monkeypatch):
    monkeypatch.setattr(mpi, "find_starter", lambda *_: Starter("openmpi", "5.0", "/o"))
    assert choose(Place("auto", None, None, None, {})) == OpenMPI(Starter("openmpi", "5.0", "/o"))
    monkeypatch.setattr("dbrdist_launch.backends._KNOWN", {"srun": lambda place: None})
    with pytest.raises(LaunchError, match="no mpiexec, srun or flux fits"):
        choose(Place("auto", None, None, None, {}))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [SimpleNamespace(name="other")])
    with pytest.raises(LaunchError, match=r"--backend 'mine': expected auto, .* or the name of an installed plugin"):
        choose(Place("mine"))


def test_mpiexec_is_looked_for_beside_the_interpreter_beside_the_library_and_along_path(tmp_path, monkeypatch):
    for folder in ("env/bin", "mpi/bin", "path", "."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "mpirun").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        mpi.shutil,
        "which",
        lambda name, path: os.path.join(path, name) if os.path.exists(os.path.join(path, name)) else None,
    )
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(tmp_path / "path"), str(tmp_path / "env/bin")]))
    python = str(tmp_path / "env/bin/python")

    def found(*arguments):
        paths = [os.path.relpath(path, tmp_path) for path in mpi.candidates(*arguments)]
        return [path for path in paths if not path.startswith("..")]

    here = ["env/bin/mpirun", "mpirun", "path/mpirun"]
    assert found(python, None) == here == found(python, Library("mpich", "5"))
    library = Library("mpich", "5", str(tmp_path / "mpi/lib/deep/libmpi.so"))
    assert found(python, library) == ["env/bin/mpirun", "mpi/bin/mpirun", "mpirun", "path/mpirun"]
    asked = []
    monkeypatch.setattr(mpi.shutil, "which", lambda name, path: asked.append(path))
    monkeypatch.setenv("PATH", "/p")
    assert mpi.candidates("/e/python", Library("mpich", "5", "/m/lib/libmpi.so")) == []
    assert list(dict.fromkeys(asked)) == ["/e", "/m/lib/bin", "/m/bin", "/p"]


def test_candidates_are_those_of_the_interpreter_and_of_the_library(monkeypatch):
    asked, library = [], Library("mpich", "5")
    monkeypatch.setattr(mpi, "candidates", lambda *words: asked.append(words) or ["/a", "/b"])
    monkeypatch.setattr(mpi, "examine", {"/b": Starter("mpich", "5.0", "/b")}.get)
    assert mpi.find_starter("/python", library).path == "/b" and asked == [("/python", library)]


def test_only_an_mpiexec_that_fits_the_library_is_taken(monkeypatch):
    kinds = {
        path: Starter(family, version, path)
        for path, family, version in (("/h", "mpich", "5.0"), ("/o4", "openmpi", "4.1"), ("/o5", "openmpi", "5.0"))
    }
    monkeypatch.setattr(mpi, "examine", kinds.get)
    monkeypatch.setattr(mpi.shutil, "which", lambda path: None if path == "/none" else path)

    def found(library, given=None, paths=("/other", "/h", "/o4", "/o5")):
        monkeypatch.setattr(mpi, "candidates", lambda *_: list(paths))
        return mpi.find_starter("/python", library, given).path

    five, intel = Library("openmpi", "5.0.1"), Library("intel", "2021")
    assert found(None) == "/h" == found(intel) and found(five) == "/o5" and found(Library("openmpi", "")) == "/o4"
    assert found(None, "/o4") == "/o4" and found(five, "/o5") == "/o5"
    for library, given, paths, words in (
        (five, "/h", (), r"loads openmpi 5.0.1 .* does not match /h \(mpich 5.0\)"),
        (None, "/none", (), "is not an mpiexec of MPICH, Intel MPI or Open MPI"),
        (five, "/other", (), "is not an mpiexec of MPICH, Intel MPI or Open MPI"),
        (five, None, ("/h", "/o4"), r"does not match /h \(mpich 5.0\) or /o4 \(openmpi 4.1\): "),
        (
            five,
            None,
            ("/other",),
            r"no mpiexec was found next to /python .* install a matching one \(pip install openmpi\),",
        ),
        (None, None, ("/other",), r"install a matching one \(pip install mpich \(or openmpi\)\), "),
    ):
        with pytest.raises(LaunchError, match=words):
            found(library, given, paths)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho asked >> {path}.log\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_starter_is_examined_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = program(tmp_path / "mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4' >&2")
    other = program(tmp_path / "true", "echo 'true 9.1'")
    for _ in range(2):
        assert mpi.examine(path) == Starter("openmpi", "4.1.4", path) and mpi.examine(other) is None
    assert (tmp_path / "mpiexec.log").read_text() == (tmp_path / "true.log").read_text() == "asked\n"
    assert mpi.examine(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("answer", "wheel", "found", "asked"),
    [
        ({"text": "MPICH Version: 4.2", "path": "/l"}, None, Library("mpich", "4.2", "/l"), 1),
        ({"text": "MPICH Version: 4.2", "path": "/l"}, "openmpi", Library("mpich", "4.2", "/l"), 1),
        ({"text": "HPE MPT 2.2", "path": "/l"}, "openmpi", Library("other", "HPE MPT 2.2", "/l"), 1),
        (None, "openmpi", Library("openmpi", "", ""), 2),
        (None, None, None, 2),
    ],
)
def test_the_library_of_an_interpreter(tmp_path, monkeypatch, answer, wheel, found, asked):
    """Asked once, where there is an answer; else by the wheels beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = f"echo noise\necho '{json.dumps({'mpi4py': '4', **answer})}'" if answer else "exit 1"
    python = program(tmp_path / "bin" / "python", text)
    if wheel is not None:
        (tmp_path / "lib" / "python3.11" / "site-packages" / f"{wheel}-5.0.1.dist-info").mkdir(parents=True)
    for _ in range(2):
        assert mpi.library_of(python) == found
    assert (tmp_path / "bin" / "python.log").read_text() == "asked\n" * asked


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Open MPI v5.0.3, package", ("openmpi", "5.0.3")),
        ("MPICH Version:      4.2.1\nMPICH", ("mpich", "4.2.1")),
        ("Intel(R) MPI Library 2021.13 for Linux", ("intel", "2021.13")),
        ("HPE MPT 2.2", ("other", "HPE MPT 2.2")),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n", ("cray", "8.1.28.29")),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release", ("mvapich", "2.3.7")),
        ("MVAPICH Version:\t3.0\n", ("mvapich", "3.0")),
        ("IBM Spectrum MPI v10.4, package: Open MPI", ("openmpi", "")),
        ("", ("", "")),
    ],
)
def test_versions_of_libraries(text, found):
    assert mpi.read_library_version(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build", ("intel", "2021.13")),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", ("mpich", "4.2.1")),
        ("mpiexec (OpenRTE) 4.1.4", ("openmpi", "4.1.4")),
        ("prterun (Open MPI) 5.0.3", ("openmpi", "5.0.3")),
        ("true (GNU coreutils) 9.1", ("", "")),
    ],
)
def test_versions_of_starters(text, found):
    assert mpi.read_starter_version(text) == found


# ---- hosts that answer ----------------------------------------------------------------------------------------------


def test_hosts_are_asked_by_ssh(tmp_path):
    """A host is lost by its answer, by no answer in time, and where the program itself cannot be run."""
    agent = tmp_path / "agent"
    log = tmp_path / "log"
    agent.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'case "$*" in *a*true) exit 0;; *b*true) echo one >&2; echo "no route" >&2; exit 255;; esac; exit 3\n'
    )
    agent.chmod(0o755)
    found = pools.probe_by_ssh(["here", "a", "b", "c"], str(agent), ("-o", "X=1"))
    assert found == {"b": "no route", "c": "ssh ended with exit code 3"}
    assert sorted(log.read_text().splitlines()) == [f"-o X=1 {name} true" for name in "abc"]
    nowhere = str(tmp_path / "nowhere")
    assert pools.probe_by_ssh(["a"], nowhere, ()) == {"a": f"{nowhere}: No such file or directory"}
    assert pools.probe_by_ssh(["here"], nowhere, ()) == {}


def test_a_host_that_does_not_answer_ssh_in_time_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PROBE_SECONDS", -0.9)
    agent = tmp_path / "ssh"
    agent.write_text("#!/bin/sh\nexec sleep 100\n")
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert pools.probe_by_ssh(["a"], None, ()) == {"a": "no answer within 0 s"}


# ---- Slurm ----------------------------------------------------------------------------------------------------------


def with_srun(tmp_path, monkeypatch, text, code=0):
    """A srun that says this to --mpi=list, and writes down that it was asked."""
    path = tmp_path / "srun"
    path.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\ncat << END >&2\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("code", [0, 1])
def test_what_srun_can_speak_is_asked_once_where_it_says(tmp_path, monkeypatch, code):
    with_srun(tmp_path, monkeypatch, "MPI plugin types are...\n\tnone\n\tpmi2, cray_shasta,\n\tpmix_v5", code)
    for _ in range(2):
        assert slurm.plugins() == ["none", "pmi2", "cray_shasta", "pmix_v5"]
    assert (tmp_path / "log").read_text() == "asked\n" * (1 + code)  # what failed may be repaired by then


def test_a_srun_that_is_not_there_or_does_not_run_speaks_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.plugins() == []
    (tmp_path / "srun").write_text("no program")
    (tmp_path / "srun").chmod(0o755)
    assert slurm.plugins() == []


IN_ALLOCATION = {"SLURM_JOB_ID": "1"}


@pytest.mark.parametrize(
    ("asked", "family", "environment", "mpiexec", "known", "found"),
    [
        ("auto", "mpich", IN_ALLOCATION, None, ["none", "pmi2"], "pmi2"),
        ("auto", "openmpi", IN_ALLOCATION, None, ["pmi2", "pmix_v5"], "pmix"),
        ("auto", "openmpi", IN_ALLOCATION, None, ["pmi2"], None),
        ("auto", "mpich", IN_ALLOCATION, "/m", ["pmi2"], None),
        ("auto", None, IN_ALLOCATION, None, ["pmi2"], None),
        ("auto", "mpich", {}, None, ["pmi2"], None),
        ("auto", "mpich", {**IN_ALLOCATION, "SLURM_STEP_ID": "batch"}, None, ["pmi2"], "pmi2"),
        ("auto", "mpich", {**IN_ALLOCATION, "SLURM_STEP_ID": "4294967291"}, None, ["pmi2"], "pmi2"),
        ("auto", "mpich", {**IN_ALLOCATION, "SLURM_STEP_ID": "0"}, None, ["pmi2"], None),
        ("srun", "mpich", {}, "/m", ["pmi2"], "pmi2"),
        ("srun", None, {}, None, ["pmi2"], "pmi2"),
        ("srun-pmix", None, {}, None, ["pmi2", "pmix_v5"], "pmix"),
        ("srun-pmix", None, {}, None, ["pmi2"], "supports pmi2, but the program needs pmix"),
        ("srun-pmi2", "openmpi", {}, None, ["pmi2"], "openmpi 5 uses pmix with srun; with pmi2"),
        ("srun-pmix", "openmpi", {}, None, ["pmix"], "pmix"),
        ("srun", "mpich", {}, None, [], "there is no working srun in PATH"),
        ("auto", "mpich", IN_ALLOCATION, None, [], None),
    ],
)
def test_which_protocol_srun_is_given(monkeypatch, asked, family, environment, mpiexec, known, found):
    monkeypatch.setattr(slurm, "plugins", lambda: known)
    place = Place(asked, None, family and Library(family, "5"), mpiexec, environment)
    if found in ("pmi2", "pmix", None):
        assert slurm.choose(place) == (found and Srun(found))
    else:
        with pytest.raises(LaunchError, match=found):
            slurm.choose(place)


def test_words_of_srun(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_abort_delay", raising=False)
    bound = Srun("pmi2").command(Job(("x",), 5, PAIR, (), "numa"), ["p"])[1:]
    text = "--mpi=pmi2 -n 5 -N 2 --nodelist a,b --cpu-bind=ldoms --kill-on-bad-exit=0 --export NONE p"
    assert bound == text.split()  # hosts with unlike slots have no number of tasks for each
    assert "--cpu-bind=cores" in Srun("pmi2").command(Job(("x",), 5, bind="core"), ["p"])
    assert Srun("pmi2").environment(Job(("x",), 5)) == {}
    assert Srun("pmix").environment(Job(("x",), 5))["OMPI_MCA_mpi_abort_delay"] == "1"
    monkeypatch.setenv("OMPI_MCA_mpi_abort_delay", "7")
    assert Srun("pmix_v5").environment(Job(("x",), 5))["OMPI_MCA_mpi_abort_delay"] == "7"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}, [("n1", 2), ("n2", 2), ("n3", 1)]),
        ({"SLURM_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "4"}, [("n1", 4)]),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_NODELIST": "n2", "SLURM_TASKS_PER_NODE": "3",
          "SLURM_JOB_CPUS_PER_NODE": "4"}, [("n1", 3)]),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4,2"}, [("n1", 4), ("n2", 2), ("n3", 2)]),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, [("n1", 1), ("n2", 1)]),
        ({"SLURM_JOB_NODELIST": ""}, []),
    ],
)  # fmt: skip
def test_nodes_of_an_allocation_with_their_tasks(variables, found):
    assert [tuple(host) for host in slurm.allocation({**IN_ALLOCATION, **variables})] == found
    assert slurm.allocation(variables) == ()


@pytest.mark.parametrize(
    ("backend", "variables", "found"),
    [
        ("hydra", {"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 0)),
        ("hydra", {"PMI_RANK": "x", "PMI_SIZE": "1"}, None),
        ("hydra", {"PMI_RANK": "0"}, None),
        ("openmpi", {"PMIX_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 0, 0)),
        ("srun", {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "9", "SLURM_LOCALID": "1",
                  "SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_NODEID": "1"}, (2, 3, 1, 2)),
        ("srun", {"SLURM_PROCID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "1,2",
                  "SLURM_NODEID": "2"}, (2, 9, 0, 0)),
        ("srun", {"SLURM_PROCID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "1,2"}, (2, 9, 0, 0)),
    ],
)  # fmt: skip
def test_ranks_are_read_as_their_starter_tells_them(backend, variables, found):
    identity = of_environment(backend, variables)
    assert (identity and tuple(identity[:4])) == found


@pytest.mark.parametrize(
    ("counts", "found"),
    [("3", [3]), ("999999", [999999]), ("1000000", []), ("2(x3),1", [2, 2, 2, 1]), ("0(x2)", [0, 0]), ("2(x0)", [])],
)
def test_counts_of_slurm(counts, found):
    assert repeated(counts) == found


def test_a_requeue_that_slurm_refuses_is_told(tmp_path, monkeypatch):
    script = "[ $1 = show ] && exit\necho refused >&2\nexit 1"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert requeue(Outcome(75)) == "Slurm job 7 could not be requeued: refused"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2-00:00:00", 172800), ("23:59:59", 86399), ("1-00:00:00", 86400), ("01:01:01", 3661)],
)
def test_times_of_slurm_in_seconds(text, seconds):
    assert requeueing._seconds(text) == seconds


def test_ssh_knows_names_that_its_configuration_turns_into_others(monkeypatch):
    asked = []
    monkeypatch.setattr(sessions.hosts, "resolve", lambda name: "1.2.3.4" if name == "known" else None)
    one = SimpleNamespace(settings=SimpleNamespace(ssh=None))
    for lines, is_known in (
        ("user me\nhostname known\nsendenv LANG LC_* X\nbare\n", True), ("hostname alias\n", False),
        ("hostname unknown\n", False), ("user me\n", False), ("", False),
    ):  # fmt: skip

        def run(words, lines=lines, **options):
            asked.append(words)
            return SimpleNamespace(stdout=lines)

        monkeypatch.setattr(sessions.subprocess, "run", run)
        assert sessions.Session._ssh_knows(one, "alias") is is_known
    assert asked == [["ssh", "-G", "alias"]] * 5
    for error in (OSError(), subprocess.TimeoutExpired("ssh", 5)):
        monkeypatch.setattr(sessions.subprocess, "run", lambda *args, error=error, **options: raise_(error))
        assert not sessions.Session._ssh_knows(one, "alias")


def raise_(error):
    raise error


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("option", ["Port=22", "ProxyCommand=nc %h %p"])
def test_options_of_ssh_with_spaces_go_into_a_script(tmp_path, monkeypatch, option, has_folder):
    monkeypatch.setattr(jobs, "base", lambda: str(tmp_path / "jobs"))
    folder = JobFolder("a", ["b"], "c") if has_folder else None
    here = SimpleNamespace(settings=SimpleNamespace(ssh="/bin/echo", ssh_option=(option,)), folder=folder)
    here._has_spaces = lambda: Session._has_spaces(here)
    agent, options = Session._ssh(here)
    if has_folder and " " in option:
        assert options == ()
        said = subprocess.run([agent, "node1", "true"], capture_output=True, text=True, check=True).stdout
        assert said == f"-o {option} node1 true\n"
    else:
        assert (agent, options) == ("/bin/echo", ("-o", option))
    if has_folder:
        folder.close()
