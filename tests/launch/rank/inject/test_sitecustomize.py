"""What the hooks in a rank's Python tell of it, beside the program's own exit code, and what they leave as it was."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from inject import INJECT

pytestmark = pytest.mark.programs


class Told:
    """What a program told and wrote."""

    def __init__(self, program, *options, number=0, path=None, preexec_fn=None, **environ):
        read, write = os.pipe()
        os.set_blocking(read, False)
        env = {
            "PYTHONPATH": os.pathsep.join([INJECT, *([path] if path else [])]), "TOLD": str(write),
            "DBRDIST_LAUNCH_EVENTS": f"{write},{number}", **environ,
        }  # fmt: skip
        words = [sys.executable, "-S", *options, "-c", f"import sitecustomize\n{program}"]
        child = subprocess.run(
            words, env=env, pass_fds=(write,), capture_output=True, text=True, timeout=60, preexec_fn=preexec_fn
        )
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            self.raw = (pipe.read() or b"").splitlines()
        self.code, self.out, self.err = child.returncode, child.stdout, child.stderr
        self.events = [json.loads(line[1:]) for line in self.raw if line.startswith(b"\x1e")]
        self.kinds = [event["event"] for event in self.events]

    def of(self, kind):
        (found,) = [event for event in self.events if event["event"] == kind]
        return found


def test_a_program_tells_that_it_is_there_leaving_and_gone():
    one = Told("import os; print(os.getpid())")
    pid = int(one.out)
    assert one.events == [
        {"event": "hooks", "pid": pid, "message": ""},
        {"code": 0, "finalizes": False, "size": 0, "event": "leaving", "pid": pid, "message": ""},
        {"event": "finished", "pid": pid},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "sys.exit()", "sys.exit(None)", "sys.exit(0)", "sys.exit(3)", "sys.exit(259)", "sys.exit(-1)",
        "sys.exit('words')", "sys.exit((3, 4))", "sys.exit(())", "sys.exit(True)", "sys.exit(2.0)", "1 / 0",
        "try: sys.exit(3)\nexcept SystemExit: pass", "try: sys.exit(3)\nexcept SystemExit: pass\nsys.exit(4)",
        "try: sys.exit(3)\nexcept SystemExit: pass\n1 / 0", "def f(): sys.exit(5)\nf()",
    ],
)  # fmt: skip
def test_the_code_that_is_told_is_that_of_the_end(program):
    one = Told(f"import sys\n{program}")
    assert one.of("leaving")["code"] == one.code and one.kinds[0] == "hooks" and one.kinds[-1] == "finished"
    assert ("exception" in one.kinds) == ("ZeroDivisionError" in one.err)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("try: sys.exit(3)\nfinally: x = 1", 3),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0),
        ("def f():\n    try: sys.exit(3)\n    except SystemExit: return\nf()", 0),
        ("try: sys.exit(3)\nexcept SystemExit as error: kept = error", 0),
        ("try: sys.exit(3)\nexcept SystemExit: sys.exit(4)", 4),
        ("import threading\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0),
        ("sys.exit('words')", 1), ("sys.exit(None)", 0), ("sys.exit((5,))", 5), ("sys.exit(258)", 2),
    ],
)  # fmt: skip
def test_the_code_of_an_exit_is_known_where_nobody_caught_it(program, code):
    one = Told("import sys\n" + program)
    assert (one.of("leaving")["code"], one.code) == (code, code)


def test_an_exit_that_was_caught_keeps_nothing(tmp_path):
    """Neither the frames, with their files and arrays, nor the exception itself."""
    program = (
        "import gc, sys, weakref\nclass A: pass\nkept = []\n"
        "def leave():\n    a = A(); kept.append(weakref.ref(a)); file = open('x', 'w'); file.write('whole')\n"
        "    sys.exit(3)\n"
        "def caller():\n    try: leave()\n    except SystemExit: pass\n"
        "caller(); print(kept[0]() is None, open('x').read())"
    )
    assert Told(f"import os\nos.chdir({str(tmp_path)!r})\n" + program).out == "True whole\n"


def test_hooks_cost_nothing_where_nothing_happens():
    """An audit hook would be called at each `id()` and `open()`."""
    text = pathlib.Path(INJECT, "sitecustomize.py").read_text()
    assert "addaudithook" not in text


def test_the_hooks_of_exceptions_stand_where_pythons_own_stood():
    program = (
        "import sys, threading\nprint(sys.excepthook is sys.__excepthook__, sys.excepthook.__name__)\n"
        "print(threading.excepthook is threading.__excepthook__)\n"
        "def mine(*more):\n    print('mine'); sys.__excepthook__(*more)\nsys.excepthook = mine\n1 / 0"
    )
    one = Told(program)
    assert one.out == "True excepthook\nTrue\nmine\n" and "ZeroDivisionError" in one.err
    assert one.of("exception")["message"] == "ZeroDivisionError: division by zero"
    one = Told("import sys\nsys.excepthook = lambda *more: print('mine')\n1 / 0")
    assert one.out == "mine\n" and one.of("exception")["message"] == "ZeroDivisionError: division by zero"


def test_an_exception_is_told_when_it_comes_and_not_at_the_end():
    """Until then the program may hang, or end itself in another way."""
    one = Told("import atexit, os\natexit.register(os._exit, 5)\n1 / 0")
    assert one.kinds == ["hooks", "exception"] and one.code == 5
    assert one.of("exception")["message"] == "ZeroDivisionError: division by zero"


def test_nothing_of_the_hooks_is_seen_by_the_program():
    program = (
        "import faulthandler, os, pickle, sys\n"
        f"print({INJECT!r} in sys.path, [name for name in os.environ if name.startswith('DBRDIST')])\n"
        "print(os.environ.get('PYTHONPATH'), faulthandler.is_enabled(), os.get_inheritable(int(os.environ['TOLD'])))\n"
        "print(pickle.loads(pickle.dumps(sys.exit)) is sys.exit, sys.exit.__module__, sys.exit.__qualname__)\n"
        "print(bool(sys.exit.__doc__), sys.modules['sitecustomize'].__file__)"
    )
    for before, after in (
        ({"DBRDIST_LAUNCH_INJECTED": "unset"}, "None"),
        ({"DBRDIST_LAUNCH_INJECTED": "empty"}, ""),
        ({"DBRDIST_LAUNCH_INJECTED": "set", "PYTHONPATH": INJECT + ":/a:/b"}, "/a:/b"),
        ({"DBRDIST_LAUNCH_INJECTED": "set", "PYTHONPATH": "/w:" + INJECT + ":/a"}, "/w:/a"),  # a wrapper's own
        ({"DBRDIST_LAUNCH_INJECTED": "unset", "PYTHONPATH": "/w:" + INJECT}, "/w:"),
    ):
        lines = Told(program, **before).out.splitlines()
        assert lines[:3] == ["False []", f"{after} True False", "True sys exit"]
        assert lines[3] == f"True {INJECT}/sitecustomize.py"


@pytest.mark.parametrize("wanted", ["9999,0", "x", "1,2,3", ""])
def test_without_a_pipe_the_program_runs_without_hooks(wanted):
    one = Told("import sys; print(sys.exit.__qualname__); sys.exit(3)", DBRDIST_LAUNCH_EVENTS=wanted)
    assert (one.code, one.raw, one.err) == (3, [], "") and one.out == "exit\n"


def test_the_sites_own_customization_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__)\n")
    program = "import sys; print(sys.modules['sitecustomize'].__file__)"
    one = Told(program, path=str(tmp_path))
    assert one.out == f"own sitecustomize\n{tmp_path}/sitecustomize.py\n" and one.kinds[0] == "hooks"
    (tmp_path / "sitecustomize.py").write_text("import nothing_of_this_name\n")
    assert "No module named 'nothing_of_this_name'" in Told(program, path=str(tmp_path)).err


def test_stacks_come_on_a_signal_where_one_is_given():
    program = f"import os\ndef here(): os.kill(os.getpid(), {int(signal.SIGUSR2)})\nhere()\nprint('alive')"
    one = Told(program, number=int(signal.SIGUSR2))
    text = b"\n".join(line for line in one.raw if not line.startswith(b"\x1e")).decode()
    assert (one.code, one.out) == (0, "alive\n") and text.startswith("Current thread 0x") and "in here" in text
    assert Told(program).code == -signal.SIGUSR2


def test_exceptions_of_threads_are_told_and_shown():
    program = (
        "import sys, threading\nfor act, name in ((lambda: 1 / 0, 'a'), (sys.exit, 'b'), (lambda: sys.exit(3), 'c')):\n"
        "    t = threading.Thread(target=act, name=name); t.start(); t.join()"
    )
    one = Told(program)
    assert one.kinds == ["hooks", "thread", "leaving", "finished"] and one.err.count("ZeroDivisionError") == 1
    thread = one.of("thread")
    assert (thread["name"], thread["message"]) == ("a", "ZeroDivisionError: division by zero")


def test_words_of_an_exception_fit_into_one_piece():
    """A pipe takes 4096 bytes in one piece: 2000 letters at most, halved until they fit."""
    for letter, kept in (("a", 2000), ("é", 500), ("🎉", 250)):
        one = Told(f"raise ValueError({letter!r} * 3000)")
        assert one.of("exception")["message"] == f"ValueError: {letter * 3000}"[:kept]
        assert max(map(len, one.raw)) <= 4001 and one.of("leaving")["code"] == 1


def test_a_forked_child_tells_nothing():
    program = "import os, sys\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: 1 / 0"
    one = Told(program)
    assert one.kinds == ["hooks", "leaving", "finished"] and "ZeroDivisionError" in one.err


def test_a_file_of_the_program_under_the_pipes_number_is_left_alone(tmp_path):
    path = tmp_path / "own"
    program = (
        "import os\nnumber = int(os.environ['TOLD'])\n"
        f"os.dup2(os.open({str(path)!r}, os.O_CREAT | os.O_RDWR), number)\n1 / 0"
    )
    assert Told(program).kinds == ["hooks"] and path.read_bytes() == b""
    assert Told("import os\nos.close(int(os.environ['TOLD']))\n1 / 0").kinds == ["hooks"]


def test_late_requests_are_ignored_where_the_program_hears_them():
    program = (
        "import atexit, signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\natexit._run_exitfuncs()\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)"
    )
    assert Told(program).out == "True True\n"


@pytest.mark.parametrize(("is_initialized", "is_finalized"), [(True, False), (False, False), (True, True)])
def test_the_world_is_told_once_mpi_is_loaded(tmp_path, is_initialized, is_finalized):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        f"class COMM_WORLD:\n    Get_size = staticmethod(lambda: 5)\n"
        f"Is_initialized, Is_finalized = (lambda: {is_initialized}), (lambda: {is_finalized})\n"
    )
    program = "import sys\nfrom mpi4py import MPI\nprint([type(one).__name__ for one in sys.meta_path])"
    one = Told(program, path=str(tmp_path))
    lasts = is_initialized and not is_finalized
    assert ("world" in one.kinds) == lasts and "_World" not in one.out
    if lasts:
        assert one.of("world")["size"] == 5
    leaving = one.of("leaving")
    assert (leaving["finalizes"], leaving["size"]) == ((True, 5) if lasts else (False, 0))
    assert "_World" in Told("import sys; print([type(one).__name__ for one in sys.meta_path])").out


def test_lines_are_written_whole_and_what_the_user_says_of_buffers_holds():
    program = "import sys; print(sys.stdout.line_buffering, sys.stdout.write_through, type(sys.stdout.buffer).__name__)"
    assert Told(program).out == "True False BufferedWriter\n"
    assert Told(program, "-u").out == "False True _Whole\n"
    assert Told(program, PYTHONUNBUFFERED="1").out == "False True _Whole\n"
    assert Told(program, PYTHONUNBUFFERED="0").out == "False False BufferedWriter\n"
    assert Told(program, PYTHONUNBUFFERED="").out == "True False BufferedWriter\n"


def test_streams_without_a_buffer_are_as_python_makes_them():
    """All that a program may ask of them, but the type of what is within."""
    names = "name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed"
    of_each = ", ".join([*(f"s.{name}" for name in names), "s.buffer.name", "s.buffer.mode", "s.fileno()"])
    program = f"import sys; print([({of_each}) for s in (sys.stdout, sys.stderr)])"
    words = [sys.executable, "-c", program]
    plain = subprocess.run(words, env={"PYTHONUNBUFFERED": "1"}, capture_output=True, text=True, timeout=60)
    assert Told(program, PYTHONUNBUFFERED="1").out == plain.stdout != ""


def test_a_handler_may_print_while_the_program_prints():
    """Without a buffer, as with `python -u`, there is no buffer that the handler could find in use."""
    program = (
        "import os, signal, sys\n"
        "def hear(number, frame): print('heard')\n"
        "signal.signal(signal.SIGALRM, hear)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "for _ in range(3000): print('x' * 2000)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    one = Told(program, "-u")
    assert one.code == 0, one.err
    assert one.out.count("x") == 3000 * 2000 and "heard" in one.out


def test_what_the_user_has_ignored_stays_ignored():
    number = signal.SIGRTMAX - 3
    program = f"import faulthandler, signal\nprint(signal.getsignal({int(number)}), faulthandler.is_enabled())"

    def ignore():
        for ignored in (number, signal.SIGABRT):
            signal.signal(ignored, signal.SIG_IGN)

    assert Told(program, number=int(number), preexec_fn=ignore).out == f"{int(signal.SIG_IGN)} False\n"


def test_a_question_after_the_end_of_python_does_not_kill_the_process():
    """MPI_Finalize runs when Python has ended, and may wait long; Python itself leaves the signal's default: death."""
    number = signal.SIGRTMAX - 3
    after = (
        "import ctypes\n"
        # What stands in for MPI_Finalize: C code that Python calls at its very end.
        "ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)\n"
    )
    env = {"PYTHONPATH": INJECT}
    read, write = os.pipe()
    env["DBRDIST_LAUNCH_EVENTS"] = f"{write},{number}"
    words = [sys.executable, "-S", "-c", f"import sitecustomize\n{after}"]
    with subprocess.Popen(words, env=env, pass_fds=(write,)) as child:
        os.close(write)
        told = b""
        while b"finished" not in told:
            data = os.read(read, 4096)
            assert data, "it ended"
            told += data
        with open(f"/proc/{child.pid}/status") as file:
            (ignored,) = [int(line.split()[1], 16) for line in file if line.startswith("SigIgn:")]
        child.kill()
    os.close(read)
    assert ignored >> (number - 1) & 1
