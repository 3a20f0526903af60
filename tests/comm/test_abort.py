"""One rank's failure ends a real job: with the right exit code, the rank in the text, and soon."""

import multiprocessing
import subprocess
import sys

import pytest

from dbrdist.comm import abort, environment, exit_status
from tests.comm import jobs

pytestmark = pytest.mark.slow  # each job takes a second or more

FAIL = jobs.PROGRAMS / "fail.py"
GUARDED = jobs.PROGRAMS / "guarded.py"


@pytest.mark.parametrize(
    ("deed", "code", "text"),
    [
        ("exception", 1, "[rank 1] ValueError: broken on purpose"),
        ("setting", 1, "[rank 1] ValueError: TopK: fraction: expected"),
        ("exit", 3, "[rank 1] exit status 3"),
        ("exit text", 1, "[rank 1] why I leave"),
        ("raise", 4, "[rank 1] exit status 4"),
        ("raise true", 1, "[rank 1] exit status 1"),
        ("raise 256", 1, "[rank 1] exit status 1"),
        ("thread", 1, "[rank 1] thread 'helper' died:"),
        ("interrupt", 130, "[rank 1] interrupted"),
    ],
)
def test_a_failure_on_one_rank_ends_the_job(deed, code, text):
    outcome = jobs.run(3, FAIL, deed, python=jobs.REAL)
    assert outcome.code == code, outcome.text
    assert text in outcome.text
    assert "the end of" not in outcome.text


@pytest.mark.parametrize("deed", ["kill", "os._exit"])
def test_a_rank_that_vanishes_ends_the_job(deed):
    """The launcher sees to that; which rank's code it passes on, the first's or that of those it killed, is a race."""
    outcome = jobs.run(3, FAIL, deed)
    assert outcome.code in (9, 137) + ((3,) if deed == "os._exit" else ())


PLACES = ["dataset", "forward", "backward", "hook", "evaluator", "extension", "snapshot"]


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_anywhere_in_training_ends_the_job(place, tmp_path):
    outcome = jobs.run(3, jobs.PROGRAMS / "fails_somewhere.py", place, tmp_path)
    assert outcome.code == 1, outcome.text
    assert f"[rank 1] ValueError: broken on purpose in {place}" in outcome.text
    assert "the end of" not in outcome.text


@pytest.mark.parametrize("deed", ["nothing", "caught", "thread exit"])
def test_a_program_that_fails_nowhere_is_not_ended(deed):
    outcome = jobs.run(3, FAIL, deed)
    assert outcome.code == 0, outcome.text
    assert sorted(outcome.lines("the end")) == [f"the end of rank {r}" for r in range(3)]
    assert not outcome.lines("[rank")


@pytest.mark.parametrize("deed", ["return", "exit none", "finalize", "early import"])
def test_a_rank_that_left_while_others_wait_for_it_is_reported_and_the_job_ended(deed):
    outcome = jobs.run(3, FAIL, deed, python=jobs.REAL if "import" in deed else None)
    assert outcome.code & 1, outcome.text  # mpiexec adds what the rank that left returned
    assert "rank 1 has left, but rank 0 has waited" in outcome.text
    assert "rank 2 has waited" in outcome.text
    assert "for rank 1 in allreduce (" in outcome.text
    assert "fail.py:" in outcome.text


def test_a_rank_that_works_on_alone_is_left_alone():
    outcome = jobs.run(3, FAIL, "slow")
    assert outcome.code == 0, outcome.text
    assert "the slow rank is done" in outcome.text
    assert outcome.lines("[rank") == ["[rank 0] finished 5 s ago; rank 1 of 3 still running"]


def test_ranks_that_fail_alike_all_say_so():
    outcome = jobs.run(3, FAIL, "all raise")
    assert outcome.code == 1, outcome.text
    assert {line[:8] for line in outcome.text.splitlines() if "ValueError:" in line} == {
        f"[rank {r}]" for r in range(3)
    }
    outcome = jobs.run(3, FAIL, "all exit")
    assert (outcome.code, outcome.lines("[rank")) == (75, [])


def test_an_earlier_hook_is_called_too():
    outcome = jobs.run(2, FAIL, "hook")
    assert outcome.code == 1
    assert "earlier hook: seen by both hooks" in outcome.text
    assert outcome.lines("[rank 1]")[0] == "[rank 1] ValueError: seen by both hooks"
    assert "of this rank are in" in outcome.lines("[rank 1]")[1]


def test_no_prefix_where_the_launcher_puts_it():
    outcome = jobs.run(2, FAIL, "exception", DBRDIST_LAUNCH="1")
    assert outcome.code == 1
    assert outcome.lines("ValueError: broken on purpose")
    assert not outcome.lines("[rank")


@pytest.mark.parametrize(
    ("deed", "code", "text"),
    [
        ("exception", 1, "[rank 1] ValueError: broken on purpose"),
        ("exit", 3, "exit status 3"),
        ("return 7", 7, "exit status 7"),
        ("exit text", 1, "[rank 1] why I leave"),
        ("before MPI", 1, "[rank 1] FileNotFoundError: no such data on this host"),
        ("all before MPI", 2, "the configuration is wrong"),
        ("all 75", 75, ""),
        ("nothing", 0, "done"),
    ],
)
def test_a_guarded_main(deed, code, text):
    outcome = jobs.run(3, GUARDED, deed, python=jobs.REAL)
    assert outcome.code == code, outcome.text
    assert text in outcome.text


def _installed(queue):
    queue.put((abort._is_interactive_or_worker(), sys.excepthook is sys.__excepthook__))


def test_nothing_is_installed_in_a_worker():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_installed, args=(queue,))
    worker.start()
    assert queue.get(timeout=60) == (True, True)
    worker.join(60)
    queue.close()
    assert abort._is_interactive_or_worker() is False


def test_nothing_is_installed_at_a_prompt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert abort._is_interactive_or_worker() is True


def test_one_rank_alone_behaves_as_any_program():
    """Without a launcher Python's own hooks stay, and so do its messages and exit codes."""
    program = "import sys; from dbrdist.comm import create_communicator as c; c('naive'); {}"
    for end, code, text in [
        ("sys.exit(3)", 3, ""),
        ("raise KeyError(5)", 1, "KeyError: 5"),
        ("sys.exit('x')", 1, "x\n"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", program.format(end)], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60
        )
        assert done.returncode == code
        assert done.stderr.endswith(text + ("\n" if "Key" in text else ""))
        assert "[rank" not in done.stderr


def test_the_watch_on_exits_changes_nothing_that_programs_see():
    program = """
import sys
from dbrdist.comm import exit_status
seen = []
assert exit_status.watch(lambda code: (print('left with', code, flush=True), code)[1])
for code in (0, 3, None, 'text', (1, 2)):
    try:
        sys.exit(code)
    except SystemExit as e:
        args = () if code is None else code if isinstance(code, tuple) else (code,)
        assert e.code == code and e.args == args, e.args
e = SystemExit(1, 2); assert e.code == (1, 2)
e.code = 7; assert e.code == 7
class Mine(SystemExit): pass
try:
    raise Mine(8)
except SystemExit as e:
    assert e.code == 8
raise Mine(9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (9, "left with 9\n", "")
    assert exit_status._watcher is None


def test_what_the_environment_says():
    assert environment.launched({}) == (1, 0, "")
    assert environment.launched({"PMI_SIZE": "4", "PMI_RANK": "2"}) == (4, 2, "PMI_SIZE")
    assert environment.launched({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"})[:2] == (3, 1)
    batch_script = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert environment.launched(batch_script) == (1, 0, "")
    assert environment.launched({**batch_script, "SLURM_STEP_ID": "0"}) == (8, 0, "SLURM_NTASKS")
    assert environment.prefix(3, {}) == "[rank 3] "
    assert environment.prefix(3, {"DBRDIST_LAUNCH": "1"}) == ""
    assert environment.refusal(1, {"PMI_SIZE": "1"}) == ""
    assert environment.refusal(4, {"PMI_SIZE": "4"}) == ""
    assert "PMI_SIZE=4 says that 4 ranks were started" in environment.refusal(1, {"PMI_SIZE": "4"})


def test_several_ranks_in_the_environment_but_one_in_the_world_is_refused():
    """As when the launcher of another MPI library started this process (with a variable that none reads here)."""
    program = "from dbrdist.comm import create_communicator as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=jobs.ROOT,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    )
    assert done.returncode == 1
    assert "CommunicatorError: MV2_COMM_WORLD_SIZE=2 says that 2 ranks were started" in done.stderr


def test_importing_the_room_starts_nothing():
    program = "import sys, dbrdist.comm; print([m for m in ('mpi4py', 'cupy', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_failing_test_under_mpiexec_ends_the_job(tmp_path):
    """The plugin in tests/mpi/conftest.py: the rank is named, and the other ranks do not wait for ever."""
    (tmp_path / "conftest.py").write_text((jobs.ROOT / "tests/mpi/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_it(world):\n    assert world.rank != 1\n    world.barrier()\n")
    outcome = jobs.run(3, "-m", "pytest", "-q", tmp_path, python=jobs.REAL)
    assert outcome.code == 1, outcome.text
    assert outcome.lines("[rank 1] FAILED test_it.py::test_it[naive]")
    assert "[rank 1] E       assert 1 != 1" in outcome.text
