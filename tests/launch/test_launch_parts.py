"""The launcher's parts that need no MPI: hosts, environment, lines, tracebacks, heartbeat, restarts, exit codes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
from dbrdist_launch import codes, cores, heartbeat, identity
from dbrdist_launch.backends import choose, flux, hosts, hydra, openmpi, slurm
from dbrdist_launch.backends.job import Host, Job, Place
from dbrdist_launch.backends.mpi import Library, Starter
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement import report, stalls
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.preparation import environment as forwarding
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.restarting.pool import HostPool
from dbrdist_launch.launcher.restarting.requeue import requeue
from dbrdist_launch.launcher.restarting.restarts import Policy
from dbrdist_launch.launcher.running.plan import Outcome
from dbrdist_launch.rank.gpus import for_local_rank
from support import PROGRAMS, ROOT, environment

# --- hosts


def test_host_lists_and_files(tmp_path):
    assert hosts.parse_list("a:2,b,a:1") == (Host("a", 3), Host("b", 1))
    path = tmp_path / "hosts"
    path.write_text("# two forms\na:4\nb slots=2 max_slots=4\nc 3\nd\nd\n\n")
    assert hosts.parse_file(str(path)) == (Host("a", 4), Host("b", 2), Host("c", 3), Host("d", 2))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.parse_file(str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="at least 1"):
        hosts.parse_list("a:0")


def test_hosts_of_batch_systems(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "HYDRA_HOST_FILE", "OMPI_MCA_orte_default_hostfile"):
        assert hosts.of_environment({name: str(nodes)}) == (Host("n1", 2), Host("n2", 1))
    assert hosts.of_environment({"LSB_MCPU_HOSTS": "n1 4 n2 2"}) == (Host("n1", 4), Host("n2", 2))
    assert hosts.of_environment({}) == ()
    slurm_variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert slurm.allocation(slurm_variables) == (Host("n1", 2), Host("n2", 2), Host("n3", 1))


def test_slurm_names_expand():
    assert hosts.expand("n[1-3,07],login") == ["n1", "n2", "n3", "n07", "login"]
    assert hosts.expand("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]


def test_ranks_are_placed_in_order_and_do_not_overflow():
    two = (Host("a", 2), Host("b", 2))
    assert hosts.place(two, 3, None) == ((Host("a", 2), Host("b", 1)), 3)
    assert hosts.place(two, None, 1) == ((Host("a", 1), Host("b", 1)), 2)
    with pytest.raises(LaunchError, match="5 ranks do not fit into 4 slots"):
        hosts.place(two, 5, None)


# --- environment and commands


def test_all_variables_travel_but_secrets_and_what_is_true_here_only():
    here = {
        "PATH": "", "HOME": "", "NCCL_DEBUG": "", "DATA_DIR": "/d", "HF_HOME": "/h", "DBRDIST_SEED": "1",
        "HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "OPENAI_API_KEY": "s", "DB_PASSWORD": "s", "MY_AUTH": "s",
        "HOSTNAME": "x", "PWD": "/", "DISPLAY": ":0", "SSH_CLIENT": "", "XDG_RUNTIME_DIR": "",
        "PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "SLURM_JOB_ID": "1", "DBRDIST_LAUNCH_TOKEN": "x", "RANK": "0",
        "BASH_FUNC_x%%": "() {}", "KEYBOARD": "us",
    }  # fmt: skip
    usual = ("DATA_DIR", "DBRDIST_SEED", "HF_HOME", "HOME", "KEYBOARD", "NCCL_DEBUG", "PATH")
    assert forwarding.forwarded(here) == usual
    assert forwarding.forwarded(here, ["HF_TOKEN"]) == tuple(sorted((*usual, "HF_TOKEN")))
    assert forwarding.forwarded(here, ["HF_*"], only=True) == ("HF_HOME", "HOME", "PATH")
    assert forwarding.secrets(here, usual) == [
        "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "HF_TOKEN", "MY_AUTH", "OPENAI_API_KEY",
    ]  # fmt: skip


def test_what_an_outer_launch_left_does_not_reach_this_one():
    left = {"PMI_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "DBRDIST_LAUNCH_TOKEN": "x", "DBRDIST_LAUNCH_TIMEOUT": "9"}
    assert forwarding.without_stale({**left, "PATH": "p"}) == {"DBRDIST_LAUNCH_TIMEOUT": "9", "PATH": "p"}


def test_settings_of_variables_are_values_names_and_patterns():
    assert forwarding.parse_settings(("A=b=c", "B=", "C", "D_*"), {"C": ""}) == ({"A": "b=c", "B": ""}, ["C", "D_*"])
    for wrong in ("=b", "a b=c", "1A=c", "A-B", ""):
        with pytest.raises(LaunchError, match="expected NAME=VALUE"):
            forwarding.parse_settings((wrong,), {})
    with pytest.raises(LaunchError, match="this variable is not set here"):
        forwarding.parse_settings(("NOWHERE",), {})


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
    with pytest.raises(LaunchError, match="N separate jobs of one rank"):
        choose(Place("srun-pmi2", None, ompi))
    monkeypatch.setattr(slurm, "plugins", list)
    with pytest.raises(LaunchError, match="no working srun"):
        choose(Place("srun", None, mpich))


def test_backend_that_does_not_fit_the_mpiexec_is_refused(monkeypatch):
    monkeypatch.setattr("dbrdist_launch.backends.mpi.find_starter", lambda *_: Starter("mpich", "5.0.2", "/m"))
    with pytest.raises(LaunchError, match="--backend openmpi does not fit"):
        choose(Place("openmpi"))


def test_words_of_host_files_that_are_not_used_are_named(tmp_path):
    path, said = tmp_path / "hosts", []
    path.write_text("a slots=2 user=joe max_slots=4\nb:1 port=22\n")
    assert hosts.parse_file(str(path), said.append) == (Host("a", 2), Host("b", 1))
    assert len(said) == 1 and "user=joe, port=22 not used here" in said[0]


def test_a_backend_of_a_plugin_is_found(monkeypatch):
    made = hydra.Hydra(Starter("mpich", "5", "/m"))
    point = SimpleNamespace(name="mine", value="x:y", load=lambda: lambda place: made)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    assert choose(Place("mine")) is made
    point.load = lambda: 1 / 0
    with pytest.raises(LaunchError, match="x:y cannot be loaded"):
        choose(Place("mine"))


def test_flux_runs_what_the_others_run():
    words = flux.Flux(True).command(Job(("x",), 4, (), ("PATH", "A")), ["p"])
    text = "run -n 4 --env=-* --env=PATH --env=A -o cpu-affinity=off -o pmi=pmix p"
    assert words[1:] == text.split()
    assert identity.of_environment("flux", {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"})[:2] == (1, 2)


def test_a_path_that_the_kernel_takes_gets_a_socket(monkeypatch):
    rest = len("/dbrdist-launch/0123456789ab/socket")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for letter, length, fits in (("x", 107, True), ("x", 108, False), ("é", 106, False)):  # é is two bytes
            runtime = short + "/" + letter * (length - rest - len(short) - 1)
            os.mkdir(runtime)
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
            folder = jobs.JobFolder("n", ["x"], "t")
            assert (folder.socket is not None) == fits
            if folder.socket is not None:
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(folder.socket)
            folder.close()


def test_ssh_options_with_spaces_become_a_script(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = jobs.JobFolder("n", ["x"], "t")
    path = folder.ssh_with("printf", ("%s|", "-o", "ProxyCommand=ssh -W %h:%p jump"))
    child = subprocess.run([path, "a b"], capture_output=True, text=True)
    assert child.stdout == "-o|ProxyCommand=ssh -W %h:%p jump|a b|"
    folder.close()
    assert list((tmp_path / "dbrdist-launch").iterdir()) == []


def test_identity_of_each_starter():
    hydra_says = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert identity.of_environment("hydra", hydra_says)[:4] == (1, 4, 1, 2)
    ompi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    ompi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"
    assert identity.of_environment("openmpi", {**hydra_says, **ompi})[:4] == (3, 4, 1, 2)  # the first are stale
    step = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert identity.of_environment("srun", {**step, "SLURM_STEP_TASKS_PER_NODE": "2,1"})[:4] == (2, 3, 0, 1)
    assert identity.of_environment("hydra", ompi) is None


@pytest.mark.parametrize("text", ["", "2(x", "a", "2(xb)", "-1", "1,,2", "2(x99999999999)"])
def test_odd_counts_of_slurm_are_no_numbers(text):
    assert identity.repeated(text) == []
    assert identity.repeated("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError, match="as the tasks of each node"):
        slurm.allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": text or "x"})


def test_one_gpu_per_local_rank():
    assert for_local_rank(1, {"CUDA_VISIBLE_DEVICES": "4,5"}) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert for_local_rank(1, {"CUDA_VISIBLE_DEVICES": ""}) == {}


def test_cores_count_affinity():
    assert 1 <= cores.available_cores() <= len(os.sched_getaffinity(0))


# --- lines, tracebacks, reports


def test_last_traceback_is_found_among_other_lines():
    lines = [
        "noise",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    g()",
        "KeyError: 'x'",
        "bye",
    ]
    text, last = report.last_traceback(lines)[:2]
    assert last == "KeyError: 'x'"
    assert text.splitlines()[0].startswith("Traceback") and text.splitlines()[-1] == last
    assert report.last_traceback(["nothing"]) is None
    assert report.last_traceback(["Fatal Python error: Aborted", "x"])[1] == "Fatal Python error: Aborted"


def test_aborts_are_read():
    assert report.find_abort({}, ["Abort(7) on node 2 (rank 2 in comm 0): application called MPI_Abort"], 1) == (2, 7)
    text = ["MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD", "  Proc: [[1,1],1]", "with errorcode 9."]
    assert report.find_abort({}, text, 1) == (1, 9)
    assert report.find_abort({}, ["fine"], 1) is None


def test_abort_under_srun_is_read_from_the_rank_that_waits_before_it():
    ranks = {number: Rank(number, "a", channel=None) for number in range(3)}
    ranks[1].take_output("err", b"[a:4711] Delaying for 1 seconds before aborting\n")
    assert report.find_abort(ranks, [], 7) == (1, 7)
    assert report.find_abort(ranks, [], 14) is None  # it lost a peer: another rank is the cause
    ranks[0].take_output("err", b"[a:4712] Delaying for 1 seconds before aborting\n")  # it lost rank 1 a second later
    assert report.find_abort(ranks, [], 7) == (1, 7)


def test_wait_statuses_tell_exit_codes_from_signals():
    assert codes.from_wait_status(9 << 8) == (9, 0)
    assert codes.from_wait_status(9) == (137, 9)
    assert codes.signal_name(signal.SIGSEGV) == "SIGSEGV"
    assert codes.signal_name(signal.SIGRTMIN + 2) == "SIGRTMIN+2"


def stacks(name, line):
    return f'Current thread 0x1 (most recent call first):\n  File "t.py", line {line} in {name}\n'


def ranks_at(*what):
    """Late ranks: each (step, seconds since the beat, innermost function, state)."""
    found = []
    for number, (step, age, name, state) in enumerate(what):
        rank = Rank(number, "a", channel=None)
        rank.count, rank.step, rank.beat_at, rank.state = 1, step, 100.0 - age, state
        rank.stacks = stacks(name, number) if name else None
        found.append(rank)
    return found


@pytest.mark.parametrize(
    ("what", "culprit", "kind"),
    [
        ([(7, 9, "allreduce", "R"), (7, 9, "load", "S"), (7, 9, "allreduce", "R")], 1, "stalled"),
        ([(7, 9, "allreduce", "R"), (7, 9, None, "T"), (7, 9, "allreduce", "R")], 1, "stopped"),
        ([(7, 9, None, "R"), (7, 9, None, "R"), (6, 9, None, "R")], 2, "stalled"),
        ([(7, 8, None, "R"), (7, 9, None, "R")], 1, "stalled"),
    ],
)
def test_the_rank_that_others_wait_for_is_blamed(what, culprit, kind):
    ranks = ranks_at(*what)
    late = stalls.late_ranks(ranks, 100.0, 5.0)
    failure = stalls.blame(ranks, late, 100.0)
    assert (failure.rank, failure.kind, failure.code) == (culprit, kind, 124)


def test_paused_and_silent_ranks_do_not_stall():
    ranks = ranks_at((1, 9, None, "S"))
    ranks[0].paused = True
    assert stalls.late_ranks(ranks, 100.0, 5.0) == []
    ranks[0].paused, ranks[0].beat_at = False, None
    assert stalls.late_ranks(ranks, 100.0, 5.0) == []


def test_a_rank_without_a_stack_is_unknown():
    assert stalls.waits(Rank(0, "a", channel=None)) is None


# --- heartbeat


def test_heartbeat_travels_through_the_page(tmp_path, monkeypatch):
    page = tmp_path / "page"
    page.write_bytes(bytes(heartbeat.PAGE_BYTES))
    writer = heartbeat._Writer(str(page))
    before = time.monotonic()
    writer.beat(4, {"loss": 0.5, "total": 10})
    found = heartbeat.read(page.read_bytes())
    assert (found.number, found.step, found.paused, found.fields) == (1, 4, False, {"loss": 0.5, "total": 10})
    assert before <= found.time <= time.monotonic()
    writer.pause()
    assert heartbeat.read(page.read_bytes()).paused
    writer.beat(None, {})
    assert heartbeat.read(page.read_bytes())[:2] == (2, 4)


def test_heartbeat_without_a_launcher_does_nothing():
    program = "from dbrdist_launch import heartbeat as h; h.beat(1, a=2); h.pause(); print(h.active())"
    for value in ({}, {heartbeat.VARIABLE: "/nowhere"}):
        child = subprocess.run(
            [sys.executable, "-c", program], env=environment("x", **value), capture_output=True, text=True
        )
        assert child.stdout == "False\n", child.stderr


# --- the side channel


# --- restarts


def outcome(kind="exit", message="m", steps=-1, **more):
    return Outcome(1, Failure(kind, 1, "a", 1, message, **more), steps=steps)


def test_restarts_are_counted_and_crash_loops_stop():
    policy = Policy(max_restarts=5)
    assert [policy.after(outcome(steps=n))[0] for n in (1, 5, 9)] == [True, True, True]
    assert policy.after(outcome(steps=9)) == (True, "restart 4 of 5")
    again, why = policy.after(outcome(steps=9))
    assert not again and "the same failure 3 times in a row" in why


def test_slow_failures_of_a_program_without_beats_are_no_crash_loop():
    policy = Policy(max_restarts=9)
    for _ in range(4):
        slow = outcome()
        slow.seconds = 3600.0
        assert policy.after(slow)[0]
    quick = Policy(max_restarts=9)
    assert [quick.after(outcome())[0] for _ in range(3)] == [True, True, False]


def test_restarts_end_and_finished_jobs_do_not_restart():
    policy = Policy(max_restarts=1)
    assert policy.after(outcome(steps=1))[0]
    assert policy.after(outcome(steps=5)) == (False, "not restarted: all 1 restarts are used up")
    assert Policy(max_restarts=1).after(Outcome(0)) == (False, "")
    asked = outcome()
    asked.asked = 15
    assert Policy(max_restarts=1).after(asked) == (False, "")


def test_hanging_starts_are_retried_without_restarts():
    policy = Policy(max_restarts=0, start_retries=1)
    assert policy.after(outcome("start", may_retry=True))[0]
    assert not policy.after(outcome("start", may_retry=True))[0]


@pytest.mark.parametrize(
    ("ended", "slurm_says", "asked", "said"),
    [
        (Outcome(75, asked=15), "JobState=RUNNING Restarts=1", True, "is back in the queue"),
        (Outcome(75), "", True, "is back in the queue"),
        (outcome("host_lost"), "JobState=RUNNING Restarts=1", True, "is back in the queue"),
        (
            Outcome(75),
            "JobState=COMPLETING Restarts=1 RunTime=1-00:00:01 TimeLimit=1-00:00:00",
            True,
            "is back in the queue",
        ),
        (
            Outcome(75),
            "JobState=COMPLETING Restarts=2 RunTime=00:00:00 TimeLimit=01:00:00",
            False,
            "is back in the queue",
        ),
        (Outcome(75), "JobState=COMPLETING Restarts=1 RunTime=00:59:59 TimeLimit=01:00:00", False, "cancelled"),
        (Outcome(75), "JobState=COMPLETING Restarts=1 RunTime=2-00:00:00 TimeLimit=UNLIMITED", False, "cancelled"),
        (outcome("host_lost"), "JobState=CANCELLED Restarts=1", False, "cancelled"),
        (outcome("exit"), "JobState=RUNNING Restarts=1", False, "the program itself failed"),
        (outcome("start"), "JobState=RUNNING Restarts=1", False, "the program itself failed"),
        (Outcome(0), "JobState=RUNNING Restarts=1", False, ""),
        (Outcome(143, asked=15), "JobState=RUNNING Restarts=1", False, ""),
    ],
)
def test_only_what_was_taken_from_outside_goes_back_into_the_queue(
    tmp_path, monkeypatch, ended, slurm_says, asked, said
):
    log, other = tmp_path / "asked", "JobId=17 ArrayJobId=7 JobState=CANCELLED Restarts=3"
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $1 = show ] && echo '{other}' && echo 'JobId=7 ArrayJobId=7 {slurm_says} Priority=1' && exit\n"
        f"echo $* >> {log}\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    found = requeue(ended)
    assert found.startswith("Slurm job 7 ") and found.endswith(said) if said else found == ""
    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if asked else "")


def test_a_requeue_that_cannot_be_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert requeue(Outcome(75)) == "--requeue has no effect outside a Slurm job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Slurm job 7 could not be requeued: " in requeue(Outcome(75))


def test_lost_hosts_cool_down_and_come_back():
    now, dead = [0.0], {"b": "no answer"}
    pool = HostPool(
        hosts.parse_list("a:1,b:1"), lambda names: {n: dead[n] for n in names if n in dead}, 30.0, clock=lambda: now[0]
    )
    assert pool.after_failure() == (["b"], [])
    assert [host.name for host in pool.available()] == ["a"]
    dead.clear()
    now[0] = 10.0
    assert pool.after_failure() == ([], [])  # it answers again, but cools down
    now[0] = 31.0
    assert pool.after_failure() == ([], ["b"])
    assert [host.name for host in pool.available()] == ["a", "b"]


# --- rules


def test_launcher_and_supervisor_load_neither_numpy_nor_mpi():
    program = (
        "import sys; import dbrdist_launch.main, dbrdist_launch.launcher.cli, dbrdist_launch.launcher.session,"
        "dbrdist_launch.rank.supervisor,"
        "dbrdist_launch.doctor.cli, dbrdist_launch.heartbeat;"
        "print([n for n in ('numpy', 'mpi4py', 'cupy', 'rich', 'dbrdist') if n in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", program], env=environment("x"), capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr


def test_supervisor_runs_without_site_packages():
    words = [sys.executable, "-I", "-S", str(ROOT / "launch" / "dbrdist_launch" / "rank" / "main.py")]
    child = subprocess.run(words, capture_output=True, text=True)
    assert child.returncode == 2 and "usage: python .../dbrdist_launch/rank/main.py BACKEND ADDRESS" in child.stderr


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-n", "2", "--log-dir", "/proc/nowhere"], 2, "cannot be written"),
        (["-n", "2", "--env", "NO NAME"], 2, "expected NAME=VALUE"),
        (["-n", "2", "--record", "nowhere/x"], 2, "the folder 'nowhere' does not exist"),
        (["-n", "2", "--name", "../x"], 2, "expected a name that a folder can have"),
        (["-n", "2", "--show-ranks", "1-x"], 2, "expected numbers and ranges"),
        (["-n", "2", "--backend", "nowhere"], 2, "or the name of an installed plugin"),
        (["-n", "2", "--host-discovery", "/nowhere"], 2, "cannot be run"),
        (["-n", "2", "--hostfile", "/dev/null"], 2, "names no host"),
        (["--nproc", "2"], 2, "Did you mean '-n'?"),
        (["-n", "2", "--interface", "nowhere0"], 2, "interfaces of this host: lo"),
        (["-n", "2", "--hosts", "a:2", "--hostfile", "x"], 2, "cannot be combined"),
        (["-n", "2", "--mpiexec", "/bin/true"], 2, "is not an mpiexec of MPICH, Intel MPI or Open MPI"),
        ([], 2, "expected the number of ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, code, words):
    child = subprocess.run(
        [sys.executable, "-m", "dbrdist_launch", *arguments, "python", str(PROGRAMS / "hello.py")],
        env=environment("x"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == code
    assert words in child.stderr
    assert "hello" not in child.stdout


@pytest.mark.mpiexec
def test_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        child = subprocess.run(
            [sys.executable, "-m", "dbrdist_launch", "-n", "2", "--port", port, "python", str(PROGRAMS / "hello.py")],
            env=environment("x"),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert child.returncode == 2
    assert f"cannot listen on port {port} of 127.0.0.1" in child.stderr
