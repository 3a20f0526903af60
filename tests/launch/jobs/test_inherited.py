"""Whatever a rank inherits is what plain mpiexec would hand it, and every byte that it writes arrives."""

import hashlib
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest
from dbrdist_launch.rank.surroundings import ADDED
from support import ROOT, environment, launch, popen, run_subcommand


def each(name, cases):
    """A test for each case, under its words."""
    return pytest.mark.parametrize(name, list(cases.values()), ids=list(cases))


pytestmark = [pytest.mark.programs, pytest.mark.mpiexec]

MPIEXEC = os.path.join(os.path.dirname(sys.executable), "mpiexec")
LOOK = """
import json, os, resource, sys
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
found = {
    "blocked": status["SigBlk"], "ignored": status["SigIgn"], "umask": status["Umask"], "limits": limits,
    "folder": os.getcwd(), "nice": os.nice(0), "words": sys.argv[2:], "path": sys.path[1:],
    "cores": sorted(os.sched_getaffinity(0)), "environment": dict(os.environ), "groups": os.getgroups(),
    "input": sys.stdin.read() if os.environ["PMI_RANK"] == "0" else "",
}
json.dump(found, open(sys.argv[1] + os.environ["PMI_RANK"], "w"))
"""
# Sets the state, then becomes the program that is given.
BECOME = """
import os, resource, signal, sys
exec(os.environ["STATE"])
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
BY_MPIEXEC = {"_", "SHLVL", "STATE", "MPIR_CVAR_CH4_IPC_XPMEM_ENABLE"}


def surroundings(tmp_path, name, starter, state, ranks, *words, text="", **extra):
    """What the ranks see under a starter that begins in some state."""
    (tmp_path / "look.py").write_text(LOOK)
    command = [sys.executable, "-c", BECOME, *starter, "-n", str(ranks), sys.executable, "look.py", name, *words]
    env = {**environment("inherited", **extra), "STATE": state}
    done = subprocess.run(command, env=env, cwd=tmp_path, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{name}{rank}").read_text()) for rank in range(ranks)]
    for one in found:
        one["environment"] = {
            key: value for key, value in one["environment"].items() if key not in BY_MPIEXEC | {*ADDED} - {"PYTHONPATH"}
        }
        for key in ("PMI_FD", "PMI_ID", "PMI_PORT", "PMI_SPAWNED"):
            one["environment"].pop(key, None)
    return found


@each(
    "state",
    {
        "as it is": "",
        "SIGCHLD is blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
        "all signals are blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {9, 19})",
        "signals are ignored": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 14, 15, 20, 23, 28)]",
        "SIGCHLD is ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "few files may be open": "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096))",
        "limits": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.setrlimit(resource.RLIMIT_STACK, "
        "(1 << 22, 1 << 23)); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 31))",
        "a mask for files": "os.umask(0o027)",
        "a nice process": "os.nice(3)",
        "one core": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    },
)
def test_a_rank_inherits_what_plain_mpiexec_hands_it(tmp_path, state):
    words = ["a:b", "x y", "", "--flag", "-n", "é"]
    extra = {"ODD": "line\nline", "EMPTY": "", "PYTHONUNBUFFERED": ""}
    bare = surroundings(tmp_path, "bare", [MPIEXEC], state, 2, *words, text="typed\n", **extra)
    ours = [sys.executable, "-m", "dbrdist_launch", "--threads", "keep"]
    assert surroundings(tmp_path, "ours", ours, state, 2, *words, text="typed\n", **extra) == bare


@each(
    "given",
    {
        "nothing but a path": {},
        "bytes that are no text": {b"ODD": b"\xff\xfe", b"ODD\xff": b"1"},
        "empty values": {b"ODD": b"", b"PYTHONPATH": b"", b"PYTHONUNBUFFERED": b""},
        "odd names": {b"BASH_FUNC_x%%": b"() { echo; }", b"a-b.c": b"1", b"1x": b"2", b"sp ace": b"3"},
        "a locale": {b"LC_ALL": b"C"},
        "a locale that Python would choose itself": {b"LC_CTYPE": b"C.UTF-8"},
        "a locale that Python puts its own in the place of": {b"LC_CTYPE": b"C"},
        "many": {b"V%d" % number: b"y" * 50 for number in range(3000)},
    },
)
def test_a_program_that_is_not_python_has_the_environment_of_plain_mpiexec(tmp_path, given):
    """Python adds LC_CTYPE where the locale is C: to the launcher and to the supervisors, which are no programs."""
    own = {b"PATH": b"/usr/bin:/bin", b"HOME": b"/root", **given}
    hydra = {b"PMI_FD", b"PMI_ID", b"PMI_PORT", b"PMI_SPAWNED", b"_"}
    found = []
    for starter in ([MPIEXEC], [sys.executable, "-m", "dbrdist_launch", "--threads", "keep"]):
        words = [*starter, "-n", "2", "/bin/sh", "-c", 'cat "/proc/$$/environ" > "environment-$PMI_RANK"']
        done = subprocess.run(words, env=own, cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            lines = (tmp_path / f"environment-{rank}").read_bytes().split(b"\0")
            pairs = dict(line.split(b"=", 1) for line in lines if line)
            found.append(
                {name: value for name, value in pairs.items() if name not in hydra | {*map(str.encode, ADDED)}}
            )
    assert found[2:] == found[:2]


READS_LATE = """
import hashlib, sys, time
if sys.argv[1:]:
    time.sleep(float(sys.argv[1]))
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())
"""


@each("words", {"at once": (), "late": ("1.5",)})
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_program_gets_all_of_a_long_input(tmp_path, kind, words):
    """mpiexec reads it as fast as it can, and ends the job where a rank, which may just be starting, is slower."""
    data = os.urandom(1 << 16) * 200
    (tmp_path / "input").write_bytes(data)
    (tmp_path / "late.py").write_text(READS_LATE)
    cat = subprocess.Popen(["cat", tmp_path / "input"], stdout=subprocess.PIPE)
    with open(tmp_path / "input", "rb") as file:
        given = cat.stdout if kind == "pipe" else file
        result = launch("-n", 1, "python", "late.py", *words, cwd=tmp_path, stdin=given)
    cat.stdout.close()
    cat.wait()
    assert result.returncode == 0 and hashlib.sha256(data).hexdigest() in result.stdout, result.stderr


@each("program", {"nobody": "pass", "somebody for a while": "import sys; sys.stdin.read(5); sys.stdin.close()"})
def test_an_input_that_is_not_read_to_its_end_costs_nothing(program):
    yes = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    result = launch("-n", 2, "python", "-c", f"import os\nif os.environ['RANK'] == '0': {program}", stdin=yes.stdout)
    yes.stdout.close()
    yes.wait()
    assert result.returncode == 0, result.stderr


def test_a_restarted_program_reads_an_input_file_again(tmp_path):
    """From where the first one read it, and what comes after the job goes on where the last one ended."""
    (tmp_path / "input").write_text("before\nfirst\nsecond\n")
    program = "import os, sys; print([*sys.stdin]); sys.exit(os.environ['DBRDIST_RESTART'] != '1')"
    with open(tmp_path / "input", "rb", buffering=0) as file:
        file.seek(len("before\n"))
        words = "-n", 1, "--max-restarts", 1, "--backoff", 0.01, "python", "-c", program
        result = launch(*words, stdin=file)
        assert result.returncode == 0 and result.stdout.count("['first\\n', 'second\\n']") == 2, result.stderr
        assert file.read() == b""


COPIES = """
import os, sys
with open(f"read.{os.environ['DBRDIST_RESTART']}", "wb") as file:
    file.write(sys.stdin.buffer.read())
sys.exit(os.environ["DBRDIST_RESTART"] != "2")
"""


@pytest.mark.parametrize("size", [0, 5, 1 << 20])
def test_a_restarted_program_reads_a_short_pipe_again(tmp_path, size):
    """A configuration on stdin, for instance: the program would begin without one."""
    data = os.urandom(size)
    (tmp_path / "input").write_bytes(data)
    (tmp_path / "copies.py").write_text(COPIES)
    cat = subprocess.Popen(["cat", tmp_path / "input"], stdout=subprocess.PIPE)
    words = "-n", 1, "--max-restarts", 2, "--backoff", 0.01, "python", "copies.py"
    result = launch(*words, cwd=tmp_path, stdin=cat.stdout)
    cat.stdout.close()
    cat.wait()
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / f"read.{n}").read_bytes() == data for n in range(3)] == [True] * 3
    assert "again" not in result.stderr


def test_the_rest_of_a_long_pipe_goes_to_the_restarted_program_and_what_is_lost_is_said(tmp_path):
    yes = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    program = (
        "import os, sys; sys.exit(len(sys.stdin.read(3 << 20)) != 3 << 20 or os.environ['DBRDIST_RESTART'] != '1')"
    )
    words = "-n", 1, "--max-restarts", 1, "--backoff", 0.01, "python", "-c", program
    result = launch(*words, stdin=yes.stdout)
    yes.stdout.close()
    yes.wait()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("the restarted program does not get the first 3.") == 1, result.stderr


def test_a_script_that_names_no_interpreter_is_run_by_the_shell(tmp_path):
    """execvp(3) does it, and so do mpiexec and every shell."""
    (tmp_path / "script").write_text('echo "it runs: $1"\n')
    (tmp_path / "script").chmod(0o755)
    result = launch("-n", 1, "./script", "x y", cwd=tmp_path)
    assert result.returncode == 0 and "it runs: x y" in result.stdout, result.stderr


def test_a_small_limit_of_files_costs_the_heartbeats_alone():
    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    extra = {"PYTHONDONTWRITEBYTECODE": "1"}  # some Pythons keep half a file where the other half cannot be written
    result = launch("-n", 1, "sh", "-c", "echo hello", preexec_fn=small, env=extra)
    assert result.returncode == 0 and "hello" in result.stdout
    assert "rank 0 on" in result.stderr and "its heartbeats are not seen: File too large" in result.stderr


def test_files_that_the_user_opened_are_open_in_the_ranks(tmp_path):
    """`3>log`, `<(command)`, a job server of make: plain mpiexec hands them on."""
    script = 'echo written >&8; cat "$1"'
    words = shlex.join([sys.executable, "-m", "dbrdist_launch", "-n", "1", "sh", "-c", script, "sh"])
    shell = f"exec {words} <(echo hello) 8> {tmp_path / 'eight'}"
    done = subprocess.run(["bash", "-c", shell], env=environment("files"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("] hello\n"), done.stderr
    assert (tmp_path / "eight").read_text() == "written\n"


def test_the_list_of_added_variables_is_that_of_the_page():
    page = (ROOT / "docs" / "launch.md").read_text()
    text = page[page.index("<!-- added -->") : page.index("<!-- end of added -->")]
    assert set(re.findall(r"^\| `(\w+)`", text, re.M)) == set(ADDED)


def test_a_lone_colon_is_an_argument_like_others(tmp_path):
    program = "import sys; print(sys.argv[1:])"
    result = launch("-n", 2, "python", "-c", program, "a", ":", "-n", "3", "b")
    assert result.returncode == 0
    assert sorted(result.stdout.split("] ", 1)[1].splitlines()[0:1]) == ["['a', ':', '-n', '3', 'b']"], result.stderr
    result = launch("-n", 2, "--bare", "python", "-c", program, "a", ":", "b")
    assert result.returncode == 2 and "takes the argument ':'" in result.stderr


def test_a_supervisor_that_cannot_start_says_why():
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (26, 26))

    result = launch("-n", 1, "true", preexec_fn=few)
    assert result.returncode in (0, 71)
    assert result.returncode == 0 or "Too many open files" in result.stderr, result.stderr


# ---- every byte arrives ---------------------------------------------------------------------------------------------


def stop_and_go(process, name, seconds):
    """Ask for stacks while nobody reads, then read all."""
    until = time.monotonic() + seconds
    asked = 0
    while time.monotonic() < until:
        asked += "rank 0" in run_subcommand("stacks", name).stdout
    return asked, process.communicate(timeout=60)


@each(
    "program",
    {
        "print": "print('x' * 4_000_000)",
        "binary": "import sys; sys.stdout.buffer.write(b'x' * 4_000_001)",
        "system call": "import os; os.write(1, b'x' * 4_000_001)",
        "stderr": "import sys; print('x' * 4_000_000, file=sys.stderr)",
        "timer": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, .002, .002)\nprint('x' * 4_000_000)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)",
    },
)
@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_no_byte_is_lost_when_stacks_are_asked_for(program, options):
    name = f"stacks-{os.getpid()}-{time.monotonic_ns()}"
    process = popen("-n", 1, "--name", name, "python", *options, "-c", program)
    _, (out, err) = stop_and_go(process, name, 2.0)
    assert out.count("x") + err.count("x") >= 4_000_001 - ("print('x'" in program or "stderr" in program), err[-500:]
    assert process.returncode == 0


@each(
    "program",
    {
        "a filter": "exec > >(sleep 1; cat); echo hello",
        "a filter of stderr": "exec 2> >(sleep 1; cat >&2); echo hello >&2",
        "a filter that was slow to start and failed": "exec > >(sleep 1; cat); echo hello; exit 3",
        "two filters": "exec > >(sed s/x/h/ | (sleep 1; cat)); echo xello",
        "a late child": "(sleep 1; echo hello) &",
    },
)
def test_what_a_program_started_may_write_the_rest(program):
    result = launch("-n", 1, "bash", "-c", program)
    assert "hello" in result.stdout + result.stderr and result.returncode == (3 if "exit 3" in program else 0)


def test_a_filter_into_a_file_is_not_killed(tmp_path):
    result = launch("-n", 1, "bash", "-c", "exec > >(sleep 1; cat > out); echo hello", cwd=tmp_path)
    assert result.returncode == 0 and (tmp_path / "out").read_text() == "hello\n"


def test_what_is_ended_after_the_program_is_said():
    result = launch("-n", 1, "bash", "-c", "sleep 1000 & echo hello")
    assert result.returncode == 0 and "hello" in result.stdout
    assert re.search(r"warning: rank 0 on .*left processes, which are ended now: \d+ \(sleep 1000\)", result.stderr)


def test_a_process_that_shares_the_programs_input_is_no_filter():
    """It is ended some seconds after the program: it has not read what that wrote."""
    read, write = os.pipe()
    program = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    result = launch("-n", 1, "python", "-c", program, stdin=read)
    os.close(read)
    os.close(write)
    assert result.returncode == 0 and "left processes, which are ended now" in result.stderr, result.stderr


def test_a_reader_that_stands_still_does_not_hold_the_report_back(tmp_path):
    read, write = os.pipe()
    program = "print('x' * 300_000); raise ValueError('odd')"
    record = tmp_path / "status.json"
    with open(tmp_path / "err", "w") as err:
        process = popen("-n", 1, "--record", record, "python", "-c", program, stdout=write, stderr=err)
    os.close(write)
    until = time.monotonic() + 30
    while "failed first" not in (tmp_path / "err").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    text = (tmp_path / "err").read_text()
    while json.loads(record.read_text())["state"] == "running" and time.monotonic() < until:
        time.sleep(0.05)
    assert "ValueError: odd" in text and json.loads(record.read_text())["state"] == "failed"
    assert process.poll() is None  # it waits for the reader
    total = 0
    while data := os.read(read, 1 << 16):
        total += data.count(b"x")
    assert total == 300_000 and process.wait(30) == 1
    os.close(read)


def test_what_spawned_processes_write_is_shown(tmp_path):
    (tmp_path / "worker.py").write_text(
        "import os, sys\nfrom mpi4py import MPI\nparent = MPI.Comm.Get_parent()\n"
        "print('from the worker'); print('and its errors', file=sys.stderr)\n"
        "print(sorted(n for n in os.environ if n.startswith('DBRDIST_LAUNCH_')))\n"
        "parent.Barrier(); parent.Disconnect()\n"
    )
    (tmp_path / "main.py").write_text(
        "import sys\nfrom mpi4py import MPI\n"
        "child = MPI.COMM_SELF.Spawn(sys.executable, ['worker.py'], maxprocs=1)\nchild.Barrier(); child.Disconnect()\n"
        "print('from the rank')\n"
    )
    result = launch("-n", 1, "--log-dir", "logs", "python", "main.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(re.fullmatch(r"\[spawned \S+\] from the worker", line) for line in lines), result.stdout
    assert any(re.fullmatch(r"\[0 \S+\] from the rank", line) for line in lines)
    assert re.search(r"(?m)^\[spawned \S+\] and its errors$", result.stderr)
    assert any(line.endswith("] []") for line in lines)  # neither token nor channel
    assert "from the worker\n" in (tmp_path / "logs" / "latest" / "attempt-0" / "spawned.out").read_text()


# ---- the program is the program that it was -------------------------------------------------------------------------


def test_a_wrapper_keeps_its_own_python_path(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("")
    child = "import mine, os; print('path', os.environ['PYTHONPATH'])"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    wrapper = f"export PYTHONPATH=$PWD/lib:$PYTHONPATH; exec {sys.executable} -c {shlex.quote(program)}"
    result = launch("-n", 1, "bash", "-c", wrapper, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"path {tmp_path}/lib:{ROOT}/launch\n" in result.stdout


@pytest.mark.parametrize("given", [[], ["--quiet"]])
def test_what_follows_a_module_belongs_to_it(tmp_path, given):
    (tmp_path / "mymod.py").write_text("import sys; print(sys.argv[1:])")
    for options in (["-m", "mymod"], ["-mmymod"], ["--module=mymod"], ["--module", "mymod"]):
        words = ["-n", 1, "--env", f"PYTHONPATH={tmp_path}", *given, *options, "--lr", "3", "--quiet", "-n", "5"]
        result = launch(*words, cwd=tmp_path)
        assert "['--lr', '3', '--quiet', '-n', '5']" in result.stdout, result.stderr


HEARS = """
import os, signal, sys, time
def hear(number, frame):
    print("heard", signal.Signals(number).name, flush=True); sys.exit(0)
if sys.argv[1:]:
    signal.signal(signal.SIGUSR2, hear)
signal.signal(signal.SIGTERM, hear)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("handles", "heard"), [(["yes"], "SIGUSR2"), ([], "SIGTERM")])
def test_sigusr2_reaches_a_program_that_handles_it_and_asks_others_to_stop(tmp_path, handles, heard):
    (tmp_path / "hears.py").write_text(HEARS)
    process = popen("-n", 2, "python", "hears.py", *handles, cwd=tmp_path)
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGUSR2)
    out, err = process.communicate(timeout=40)
    assert out.count(f"heard {heard}") == 2 and process.returncode == 0, err


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGALRM, signal.SIGRTMIN + 3])
def test_what_batch_systems_may_send_does_not_end_the_launcher_without_a_word(number):
    program = (
        "import signal, sys, time\n"
        f"if sys.argv[1:]: signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    for handles, code in ((["yes"], 7), ([], 128 + number)):
        process = popen("-n", 1, "python", "-c", program, *handles)
        assert "ready" in process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=40)
        assert process.returncode == code and ("asking all ranks to save" in err) == (not handles), err


def test_an_ignored_signal_of_pythons_own_stays_ignored():
    """Python ignores SIGXFSZ itself; whether it was ignored before tells the process that started it."""
    look = "grep SigIgn /proc/self/status"
    found = []
    for starter in (MPIEXEC, f"{sys.executable} -m dbrdist_launch"):
        words = f"trap '' XFSZ; {starter} -n 1 sh -c '{look}'; true"
        done = subprocess.run(["bash", "-c", words], env=environment("ignored"), capture_output=True, timeout=60)
        found.append(int(done.stdout.split()[-1], 16))
    assert found[0] == found[1] and found[1] >> (signal.SIGXFSZ - 1) & 1


@each("has_it", {"own": True, "nobody's": False})
def test_what_is_typed_on_a_terminal_reaches_rank_0(has_it):
    """Also on one that is no session's terminal, as programs make for their children: nobody else reads there."""
    main, terminal = pty.openpty()
    program = "import os\nif os.environ['RANK'] == '0': print('got', input('name? '))"

    def lead():
        os.setsid()
        if has_it:
            os.close(os.open(os.ttyname(terminal), os.O_RDWR))

    process = popen("-n", 2, "python", "-c", program, stdin=terminal, preexec_fn=lead, env={"TERM": "dumb"})
    os.write(main, b"Ada\n")
    out, err = process.communicate(timeout=40)
    assert "got Ada" in out and process.returncode == 0, err
    os.close(main)
    os.close(terminal)
