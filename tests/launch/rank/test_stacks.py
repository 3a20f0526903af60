"""From which process stacks come, and when it is asked."""

import io
import os
import signal
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits
from dbrdist_launch.rank import stacks
from dbrdist_launch.rank.child import stack_signal
from processes import until

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("catching", "below", "text", "asked"),
    [({4242, 4243}, [4242, 4243], "Thread", 4242), ({4243}, [4242, 4243], "Thread", 4243),
     (set(), [4242, 4243], "by py-spy of [4242, 4243]", None), ({4242}, [], "by py-spy of []", None)],
)  # fmt: skip
def test_stacks_come_from_the_first_process_that_has_hooks(monkeypatch, catching, below, text, asked):
    killed, told, now = [], [], 1000.0
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: number == stack_signal() and pid in catching)
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: f"by py-spy of {pids}")
    one = stacks.Stacks(stack_signal(), lambda *answer: told.append(answer))
    one.ask(below, now)
    if asked:
        assert killed == [(asked, stack_signal())] and told == [] and one.due == now + limits.STACK_SECONDS
        one.take(b"Thread\n", now)
        one.look(now + limits.STACK_PAUSE_SECONDS / 2)
        assert told == []
        one.look(now + limits.STACK_PAUSE_SECONDS)
    assert [answer[0].strip() for answer in told] == [text] and one.due is None


def test_sources_are_the_lines_of_frames_as_far_as_a_mebibyte(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("first()\n" + "x" * ((1 << 20) - 12) + "\nab\ncd\n")  # of the third line three bytes are read
    frames = [f'  File "{path}", line {n} in f' for n in (1, 3, 4, 5)] + ['  File "<string>", line 2 in g']
    assert stacks.sources("\n".join(frames), "import a\n b()\n") == {
        f"{path}:1": "first()", f"{path}:3": "ab", f"{path}:4": "", "<string>:2": "b()",
    }  # fmt: skip
    assert stacks.sources(f'  File "{tmp_path}/none.py", line 1 in f\n  File "<string>", line 1 in g') == {
        "<string>:1": ""
    }


@pytest.mark.parametrize(
    ("machine", "wchan", "syscall", "is_cut"),
    [
        ("x86_64", "pipe_write", "", True), ("x86_64", "0", "1 0x2 0x7f", True), ("x86_64", "0", "20 0x2", True),
        ("x86_64", "0", "0 0x0 0x7f", False), ("x86_64", "0", "running\n", False), ("aarch64", "0", "64 0x2", True),
        ("aarch64", "0", "1 0x2", False), ("riscv64", "0", "1 0x2", False), ("x86_64", None, "1 0x2", False),
        ("x86_64", "0", None, False),
    ],
)  # fmt: skip
def test_who_stands_in_a_write_is_seen_by_what_the_kernel_shows(monkeypatch, machine, wchan, syscall, is_cut):
    files = {"/proc/42/wchan": wchan, "/proc/42/syscall": syscall}

    def opened(path):
        if files[path] is None:
            raise PermissionError
        return io.StringIO(files[path])

    monkeypatch.setattr(stacks, "open", opened, raising=False)
    monkeypatch.setattr(stacks.os, "uname", lambda: SimpleNamespace(machine=machine))
    assert stacks.would_cut(42) is is_cut


def test_what_comes_after_a_loop_is_not_asked_in_it():
    program = "while True:\n    time.sleep(1)\nrequest.Test()\n"
    frame = '  File "<string>", line 2 in f'
    assert stacks.sources(frame, program) == {"<string>:2": "time.sleep(1)"}
    asking = "while not request.Test():\n    time.sleep(1)\nx = 1\n"
    assert stacks.sources(frame, asking) == {"<string>:2": "time.sleep(1)  # in a loop with while not request.Test():"}


def test_two_hundred_frames_have_sources():
    program = "\n".join(f"line{n}" for n in range(1, 203))
    frames = [f'  File "<string>", line {n} in f' for n in range(1, 203)]
    found = stacks.sources("\n".join(frames), program)
    assert len(found) == 200 and found["<string>:200"] == "line200"
    assert stacks.sources(frames[0], "x" * 300) == {"<string>:1": "x" * 200}


def test_no_signal_cuts_a_write_short(monkeypatch):
    """While a process stands in a write it is not asked: the write would end there."""
    killed, told, writes = [], [], [True]
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: True)
    monkeypatch.setattr(stacks, "would_cut", lambda pid: writes[0])
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: "")
    one = stacks.Stacks(50, lambda *answer: told.append(answer))
    one.ask([1], 0.0)
    one.look(limits.STACK_LOOK_SECONDS)
    assert killed == told == []
    one.look(limits.STACK_SECONDS)
    assert killed == [] and "waits in a write" in told[0][0]
    one.ask([1], 10.0)
    writes[0] = False
    one.look(one.due)
    assert killed == [1]


def test_a_process_that_lost_its_handler_meanwhile_is_not_asked(monkeypatch):
    """While it stood in a write its Python may have come to its end: the signal would kill it."""
    killed, told, catches, writes = [], [], [True], [True]
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: catches[0])
    monkeypatch.setattr(stacks, "would_cut", lambda pid: writes[0])
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: "by py-spy")
    one = stacks.Stacks(50, lambda *answer: told.append(answer[0]))
    one.ask([1], 0.0)
    catches[0] = writes[0] = False
    one.look(limits.STACK_LOOK_SECONDS)
    assert (killed, told, one.due) == ([], ["by py-spy"], None)


@pytest.mark.slow
def test_a_process_in_a_write_is_seen():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes(1 << 20))
        os.read(read, 1)
        os.read(os.pipe()[0], 1)
        os._exit(0)
    try:
        until(lambda: stacks.would_cut(child))
        os.close(write)
        while os.read(read, 1 << 16) and stacks.would_cut(child):
            pass
        until(lambda: not stacks.would_cut(child))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read)


def test_who_waits_for_a_signal_is_not_asked():
    """Any signal would end its `pause`."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        until(lambda: stacks.would_cut(child))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("loop", "asked"),
    [
        ("while not request.Test():\n    time.sleep(0.01)", "while not request.Test():"),
        ("while True:\n    done = request.Test()\n    if done: break\n    time.sleep(1)", "done = request.Test()"),
        ("while True:\n    time.sleep(1)\n    if comm.Iprobe(): break", "if comm.Iprobe(): break"),
        ("while not MPI.Request.Testall(all):\n    pass", "while not MPI.Request.Testall(all):"),
        ("while True:\n    step()\n    time.sleep(1)", ""), ("request.Test()\ntime.sleep(1)", ""),
        ("while not request.Test():\n    compute()", ""),
        ("while not request.Test(): x()\nwhile y:\n    time.sleep(1)", ""),
        ("while True:\n    ok()\n    while a.query():\n        x()\n    b()\n    time.sleep(1)", "while a.query():"),
        ("if x:\n    time.sleep(1)\nwhile request.Test():\n    y()", ""),
        ("while (a\n       and b):\n    time.sleep(1)\n    a = r.Test()", "a = r.Test()"),
        ("for r in rs:\n    time.sleep(1)\nwhile r.Test(): y()", ""),
    ],
)  # fmt: skip
def test_who_sleeps_in_a_loop_says_what_the_loop_asks(loop, asked):
    text = "import time\n" + loop
    ends = ("time.sleep(1)", "time.sleep(0.01)", "pass", "compute()")
    at, line = next((n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip() in ends)
    found = stacks.sources(f'  File "<string>", line {at} in <module>\n', text)
    assert found == {f"<string>:{at}": line + (stacks.IN_LOOP + asked if asked else "")}


@pytest.mark.parametrize(
    ("loop", "is_waiting"),
    [
        ("while not request.Test():\n    pass", True), ("while not comm.Iprobe(): pass", True),
        ("while not request.Test():  # all\n    continue  # ask again", True), ("while not request.Test():", False),
        ("while not request.Test():\n    compute()", False), ("while not done:\n    pass", False),
        ("while not request.Test():\n    pass\n    compute()", True),
        ("while not request.Test():\n    compute()\n    pass", False),
    ],
)  # fmt: skip
def test_who_asks_without_a_pause_is_mostly_in_the_question(loop, is_waiting):
    line = loop.partition("\n")[0]
    found = stacks.sources('  File "<string>", line 1 in <module>\n  File "<string>", line 0 in f\n', loop)
    assert found == {"<string>:1": line + (stacks.IN_LOOP + line if is_waiting else "")}


def test_source_lines_are_read_where_the_program_runs(tmp_path):
    (tmp_path / "a.py").write_text("one\n  two()\n")
    text = f'Current thread 0x1 (most recent call first):\n  File "{tmp_path}/a.py", line 2 in f\n'
    text += '  File "<string>", line 3 in <module>\n  File "/nowhere", line 1 in g\n'
    found = {f"{tmp_path}/a.py:2": "two()", "<string>:3": "z"}
    assert stacks.sources(text, "x\ny\nz") == found


def test_an_answer_is_waited_for_until_its_time_is_over(monkeypatch):
    """At most so long from the signal on; what came by then is the answer, after a pause without more of it."""
    killed, told = [], []
    monkeypatch.setattr(stacks.linux, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(stacks.linux, "catches", lambda pid, number: pid == 7)
    monkeypatch.setattr(stacks, "would_cut", lambda pid: False)
    monkeypatch.setattr(stacks, "by_py_spy", lambda pids: f"by py-spy {pids}")
    one = stacks.Stacks(50, lambda text, lines: told.append((text, lines)))
    one.look(5.0)
    assert one.due is None and told == []
    one.ask([6, 7], 10.0)
    end = 10.0 + limits.STACK_SECONDS
    assert killed == [(7, 50)] and one.due == one.until == end
    one.look(end - 2**-10)
    assert told == []
    one.look(end)
    assert told == [("by py-spy [6, 7]", {})] and one.due is None
    one.look(end)
    one.take(b"late", end)
    assert len(told) == 1 and one.due is None
    one.ask([6, 7], 20.0)
    for at in (20.125, 20.25):
        one.take(b"x", at)
        assert one.due == at + limits.STACK_PAUSE_SECONDS
    one.take(b"x", one.until - limits.STACK_PAUSE_SECONDS / 2)
    assert one.due == one.until
    one.look(one.until)
    assert told[1:] == [("xxx", {})]
