"""The doctor's command line: whom it asks, what it starts, what it says of the answers, and how it ends."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dbrdist_launch.backends import hosts
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.doctor import checks, cli, record
from dbrdist_launch.doctor.findings import Findings
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.preparation.settings import LaunchSettings
from dbrdist_launch.launcher.streams.output import Piece
from facts import FACTS

HERE = os.path.dirname(cli.__file__)
PROBE = [sys.executable, os.path.join(HERE, "host_probe.py")]
CLUSTER = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", *hosts._OPERATOR_FILES, "SLURM_JOB_ID")


@pytest.fixture
def ask(monkeypatch, capsys):
    """Runs the command, with a machine that is sound unless a test says otherwise."""
    for name in CLUSTER:
        monkeypatch.delenv(name, raising=False)
    one = SimpleNamespace(fits=True, facts=[FACTS], finds=(), asked=[], looked=[], compared=[], jobs=[])

    def mpi(findings, mpiexec):
        one.asked.append(mpiexec)
        for level, title in one.finds:
            findings.add(level, title, "")
        return one.fits

    def answers(findings, names, ssh, options):
        one.asked.append((names, ssh, options))
        return one.facts

    monkeypatch.setattr(cli, "_mpi", mpi)
    monkeypatch.setattr(cli, "_hosts", answers)
    monkeypatch.setattr(cli, "_job", lambda findings, settings, *more: one.jobs.append((vars(settings), *more)))
    looks = SimpleNamespace(
        memory_and_limits=lambda findings, facts, ranks: one.looked.append((facts["host"], ranks)),
        alike=lambda findings, first, other: one.compared.append((first["host"], other["host"])),
    )
    monkeypatch.setattr(cli, "checks", looks)

    def run(*words):
        for kept in (one.asked, one.looked, one.compared, one.jobs):
            kept.clear()
        code = cli.doctor.main(list(words), standalone_mode=False)
        return code, capsys.readouterr().out.splitlines()

    one.run = run
    return one


def settings(ranks, **more):
    return vars(LaunchSettings((sys.executable, os.path.join(HERE, "mpi_probe.py")), ranks, **more))


def test_two_ranks_are_started_on_this_machine(ask):
    assert ask.run() == (0, ["a job can run here"])
    assert ask.asked == [None, ([], None, ())] and ask.looked == [("a", 2)] and ask.compared == []
    assert ask.jobs == [(settings(2), [FACTS], None)]
    ask.run("-n", "5", "--model", "2k")
    assert ask.looked == [("a", 5)] and ask.jobs == [(settings(5), [FACTS], 2000)]


def test_hosts_that_are_named_are_asked_and_compared_with_the_first(ask):
    ask.facts = [FACTS, {**FACTS, "host": "b"}, {**FACTS, "host": "c"}]
    words = ("--ssh", "/ssh", "--ssh-option", "User=me", "--ssh-option", "Port=7", "--interface", "eth0")
    more = ("--backend", "hydra", "--mpiexec", "/m")
    ask.run("--hosts", "a:2,b:3,c:1", *words, *more)
    assert ask.asked == ["/m", (["a", "b", "c"], "/ssh", ("User=me", "Port=7"))]
    assert ask.looked == [("a", 3), ("b", 3), ("c", 3)] and ask.compared == [("a", "b"), ("a", "c")]
    named = {"hosts": "a:2,b:3,c:1", "backend": "hydra", "mpiexec": "/m", "ssh": "/ssh", "interface": "eth0"}
    assert ask.jobs == [(settings(None, ssh_option=("User=me", "Port=7"), **named), ask.facts, None)]


def test_a_file_of_hosts_is_read(ask, tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a:2\nb\n")
    ask.run("--hostfile", str(path))
    assert ask.asked == [None, (["a", "b"], None, ())] and ask.looked == [("a", 2)]
    assert ask.jobs == [(settings(None, hostfile=str(path)), [FACTS], None)]


def test_no_job_is_started_where_none_would_run_or_none_is_wanted(ask):
    assert ask.run("--no-job") == (0, ["a job can run here"]) and ask.jobs == []
    ask.finds = (("ok", "x"), ("FAIL", "y"))
    assert ask.run()[0] == 1 and ask.jobs == []
    ask.finds, ask.fits = (), False
    assert ask.run()[0] == 0 and ask.jobs == []


def test_findings_are_counted_and_written(ask, tmp_path):
    ask.finds = (("ok", "x"), ("FAIL", "y"), ("warn", "z"), ("FAIL", "y"))
    path = tmp_path / "found.json"
    code, lines = ask.run("--json", str(path))
    assert (code, lines[-1]) == (1, "2 of 4 findings would make a job fail")
    entries = json.loads(path.read_text())["entries"]
    assert [(one["level"], one["title"]) for one in entries] == list(ask.finds)
    nowhere = tmp_path / "nowhere" / "found.json"
    ask.finds = ()
    assert ask.run("--json", str(nowhere)) == (0, [
        f"warn  --json           {nowhere} cannot be written: No such file or directory",
        "      -> name another file",
        "a job can run here",
    ])  # fmt: skip


@pytest.mark.parametrize("model", ["x", "25.6Q", "-1"])
def test_a_model_is_a_number_of_parameters(ask, model):
    with pytest.raises(LaunchError, match=f"--model '{model}': expected a number of parameters such as 25.6M"):
        ask.run("--model", model)
    assert ask.asked == []


def test_which_library_and_which_mpiexec_there_are(monkeypatch):
    library, starter = Library("mpich", "4.2", "/lib/x.so"), Starter("mpich", "4.1", "/bin/mpiexec")
    found, asked = [], []

    def find_starter(interpreter, library, mpiexec):
        asked.append((interpreter, library, mpiexec))
        if found[1] is None:
            raise LaunchError("none fits")
        return found[1]

    monkeypatch.setattr(cli.mpi, "library_of", lambda interpreter: found[0] if interpreter == sys.executable else None)
    monkeypatch.setattr(cli.mpi, "find_starter", find_starter)
    said = ("ok", "MPI library", "mpi4py loads mpich 4.2 (/lib/x.so)", "")
    absent = f"mpi4py of {sys.executable} loads no MPI library"
    for found[:], fits, entries in (
        ((library, starter), True, [said, ("ok", "mpiexec", "/bin/mpiexec (mpich 4.1) fits", "")]),
        ((library, None), False, [said, ("FAIL", "mpiexec", "none fits", "")]),
        ((None, starter), False, [("FAIL", "MPI library", absent, "pip install mpi4py mpich")]),
    ):
        findings = Findings()
        assert cli._mpi(findings, "/m") == fits
        assert [tuple(one.values()) for one in findings.entries] == entries
    assert asked == [(sys.executable, library, "/m")] * 2


def test_this_machine_is_asked_directly_and_others_by_ssh(monkeypatch):
    asked = []

    def facts(words, seconds):
        asked.append((words, seconds))
        name = words[-3] if len(words) > 2 else "here"
        return {"host": f"{name}.x"}, 0.25, 0.125

    monkeypatch.setattr(cli, "_facts", facts)
    monkeypatch.setattr(cli.hosts_module, "is_local", lambda name: name == "a")
    clocks = []
    monkeypatch.setattr(cli.checks, "clock", lambda findings, *more: clocks.append(more))
    findings = Findings()
    assert cli._hosts(findings, [], None, ()) == [{"host": "here.x"}] and not findings.entries
    assert cli._hosts(findings, ["a", "b"], None, ("User=me",)) == [{"host": "here.x"}, {"host": "b.x"}]
    flags = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o"]
    assert asked == [(PROBE, 20), (PROBE, 20), (["ssh", *flags, "User=me", "b", *PROBE], 20)]
    assert [(one["level"], one["detail"]) for one in findings.entries] == [
        ("ok", "a answers as here.x within 0.25 s"), ("ok", "b answers as b.x within 0.25 s"),
    ]  # fmt: skip
    assert clocks == [("a", 0.25, 0.125), ("b", 0.25, 0.125)]
    cli._hosts(findings, ["b"], "/my/ssh", ())
    assert asked[-1] == (["/my/ssh", *flags[:4], "b", *PROBE], 20)


def test_hosts_that_do_not_answer_are_findings(monkeypatch):
    errors = [
        subprocess.CalledProcessError(255, ["ssh"], stderr="banner\nPermission denied\n"),
        subprocess.CalledProcessError(127, ["ssh"], stderr=""), OSError(2, "No such file"),
        ValueError("no JSON"), IndexError("list index out of range"), subprocess.TimeoutExpired(["ssh"], 20),
    ]  # fmt: skip
    said = ["Permission denied", "Command '['ssh']' returned non-zero exit status 127.", "[Errno 2] No such file",
            "no JSON", "list index out of range", "Command '['ssh']' timed out after 20 seconds"]  # fmt: skip

    def fail(words, seconds):
        raise errors[len(findings.entries)]

    monkeypatch.setattr(cli, "_facts", fail)
    monkeypatch.setattr(cli.hosts_module, "is_local", lambda name: False)
    findings = Findings()
    assert cli._hosts(findings, ["b"] * len(errors), None, ()) == []
    assert [(one["level"], one["title"], one["detail"]) for one in findings.entries] == [
        ("FAIL", "reachable", f"b: {words}") for words in said
    ]
    assert {one["what_to_do"] for one in findings.entries} == {f"make `ssh b {sys.executable} -V` work"}


def test_a_clock_is_compared_with_the_middle_of_the_time_that_asking_took(monkeypatch):
    times = iter((100.0, 104.0))
    monkeypatch.setattr(cli, "time", SimpleNamespace(time=lambda: next(times)))
    words = ["/bin/sh", "-c", "cat; echo banner; echo '{\"time\": 123.5}'"]
    assert cli._facts(words, 20.0) == ({"time": 123.5}, 21.5, 2.0)
    times = iter((100.0, 104.0))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        cli._facts(["/bin/sh", "-c", "echo no >&2; exit 3"], 20.0)
    assert caught.value.stderr == "no\n"
    times = iter((100.0, 104.0))
    with pytest.raises(subprocess.TimeoutExpired):
        cli._facts(["/bin/sleep", "60"], 0.01)


# ---- the test job ---------------------------------------------------------------------------------------------------

RESULT = {
    "size": 2, "hosts": ["a"], "library": "MPI 1", "thread_level": 3, "thread_multiple": 3, "tcp": ["10.0.0.1"],
    "ping_pong": [[8, 1e-6], [1 << 20, 1e-3]], "allreduce": [[8, 2e-6], [1 << 20, 2e-3]],
}  # fmt: skip


class Job:
    """A session whose rank 0 prints what the test gives."""

    def __init__(self, monkeypatch, tmp_path):
        self.ranks, self.printed, self.failure, self.happened = 2, json.dumps(RESULT), None, []
        self.hosts, self.backend = ("hosts",), SimpleNamespace(label="mpich 4.1")
        monkeypatch.setattr(cli, "Session", lambda settings: self.happened.append(settings) or self)
        monkeypatch.setattr(cli._Captured, "flush", lambda output: self.happened.append("flush"))
        monkeypatch.setenv("DBRDIST_NETWORK_FILE", str(tmp_path / "network.json"))

    def job(self, hosts):
        return SimpleNamespace(ranks=self.ranks) if hosts == self.hosts else None

    def attempt(self, job, output, number, name):
        self.happened.append((job.ranks, number, name))
        for rank, stream, text in ((1, "out", '{"size": 9}\n'), (0, "out", "banner\n"), (0, "out", self.printed)):
            output.take(Piece(rank, "a", stream, text.encode()))
        return SimpleNamespace(failure=self.failure)

    def found(self, parameters=None):
        findings = Findings()
        cli._job(findings, "settings", [FACTS], parameters)
        return [(one["level"], one["title"], one["detail"]) for one in findings.entries]


@pytest.fixture
def job(monkeypatch, tmp_path):
    return Job(monkeypatch, tmp_path)


def test_what_a_test_job_measured_is_said_and_kept(job, tmp_path):
    found = job.found(1_000_000)
    assert job.happened == ["settings", (2, 0, "doctor"), "flush"]
    titles = ["MPI job", "threads", "ping-pong", "allreduce", "interface", "interface", *["scaling"] * 4, "record"]
    assert [title for _, title, _ in found] == titles
    assert found[-1] == ("ok", "record", f"kept in {tmp_path}/network.json")
    assert record.read(["a"]) == record.entry_of(RESULT)
    assert [title for _, title, _ in job.found()] == [*titles[:6], "record"]


def test_a_test_job_that_fails_or_says_nothing_is_a_finding(job):
    job.printed = ""
    (first,) = job.found()
    assert first == ("FAIL", "MPI job", "2 ranks with mpich 4.1: rank 0 printed no result")
    job.failure = SimpleNamespace(message="exit code 3")
    assert job.found() == [("FAIL", "MPI job", "2 ranks with mpich 4.1: exit code 3")]
    job.printed = json.dumps(RESULT)
    assert job.found() == [("FAIL", "MPI job", "2 ranks with mpich 4.1: exit code 3")]


def test_no_network_is_measured_by_ranks_that_are_alone(job):
    job.ranks = 4
    assert [(level, title) for level, title, _ in job.found()] == [("FAIL", "MPI job")]
    job.ranks, job.printed = 1, json.dumps({**RESULT, "size": 1})
    assert [title for _, title, _ in job.found()] == ["MPI job", "threads"]


def test_a_record_that_cannot_be_written_is_said(job, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file/network.json"
    monkeypatch.setenv("DBRDIST_NETWORK_FILE", path)
    level, title, detail = job.found()[-1]
    assert (level, title) == ("warn", "record") and detail.startswith(f"{path} cannot be written: ")


def test_rank_0s_words_are_kept_and_all_others_shown(capfd):
    output, arrived = cli._Captured(), []
    output.written = arrived.append
    pieces = [Piece(0, "a", "out", b"one\n{"), Piece(0, "a", "out", b'"x": 1}\n{"x": 2}\n')]
    assert output.result is None
    for piece in (*pieces, Piece(1, "b", "out", b"of 1\n"), Piece(0, "a", "err", b"of 0\n")):
        output.take(piece)
    assert output.said == b'one\n{"x": 1}\n{"x": 2}\n' and output.result == {"x": 1} and arrived == pieces
    output.flush()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("[1 b] of 1\n", "[0 a] of 0\n")


def test_a_model_is_predicted_for_more_ranks_too():
    """A ring of P ranks sends 2 (P - 1) / P of 4 bytes for each parameter: 0.4 s between two at 1 GB/s."""
    entry = {"ranks": 2, "allreduce_latency_seconds": 0.0, "allreduce_bandwidth_bytes_per_second": 1e9}
    findings = Findings()
    checks.model(findings, entry, 100_000_000)
    assert [(one["level"], one["title"], one["detail"]) for one in findings.entries] == [
        ("ok", "scaling", f"{ranks} ranks exchange 400 MB of gradients in {seconds} s: 90 % efficiency needs steps of "
                          f"{most} s, 50 % of {half} s{note}")
        for ranks, seconds, most, half, note in (
            (2, "0.4", "4", "0.8", ""), (4, "0.6", "6", "1.2", SAME), (8, "0.7", "7", "1.4", SAME),
            (16, "0.75", "7.5", "1.5", SAME),
        )
    ]  # fmt: skip


SAME = ", if the network stays the same"
