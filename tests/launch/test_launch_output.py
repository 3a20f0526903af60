"""What the ranks write: every byte arrives, in order, in its log and on the screen, and slow readers stop nobody."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from dbrdist_launch import limits
from dbrdist_launch.launcher.output import Output, Piece, Screen
from dbrdist_launch.loop import Loop
from dbrdist_launch.rank.outputs import Outputs
from support import assert_nothing_left, environment, launch, popen

# --- the screen


def shown(screen, *pieces):
    """What a screen makes of (rank, bytes) pieces, with one front for each rank."""
    text = b"".join(screen.feed((rank, "out"), b"[%d] " % rank, data) for rank, data in pieces)
    return text + screen.end()


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([(0, b"a\nb\n")], b"[0] a\n[0] b\n"),
        ([(0, b"a"), (1, b"x\n"), (0, b"b\n")], b"[1] x\n[0] ab\n"),
        ([(0, b"1%\r2%\r3%\n")], b"[0] 1%\r[0] 2%\r[0] 3%\n"),
        ([(0, b"a\r\nb\r"), (0, b"\nc\n")], b"[0] a\r\n[0] b\r\n[0] c\n"),
        ([(0, b"50%\rx"), (1, b"y\n")], b"[0] 50%\r\n[1] y\n[0] x\n"),
        ([(0, b"no end")], b"[0] no end\n"),
        ([(0, b"\n\n"), (1, b"\n")], b"[0] \n[0] \n[1] \n"),
        ([(0, b"\xff\x00\xfe\n")], b"[0] \xff\x00\xfe\n"),
    ],
)
def test_each_line_has_its_rank_in_front(pieces, text):
    assert shown(Screen(), *pieces) == text


def test_unfinished_lines_are_shown_after_a_while_and_go_on_where_they_stopped():
    screen = Screen()
    assert screen.feed((0, "out"), b"[0] ", b"prompt> ") == b""
    assert screen.flush(10.0) == b"" and screen.flush(10.0 + limits.PARTIAL_SECONDS) == b"[0] prompt> "
    assert screen.feed((0, "out"), b"[0] ", b"yes\n") == b"yes\n"
    screen.feed((0, "out"), b"[0] ", b"dots ..")
    screen.flush()
    assert screen.feed((1, "out"), b"[1] ", b"other\n") == b"\n[1] other\n"
    assert screen.feed((0, "out"), b"[0] ", b"..\n") == b"[0] ..\n"
    assert screen.note(b"said") == b"said\n"


def test_time_in_which_nobody_read_does_not_make_a_line_unfinished():
    screen = Screen()
    screen.feed((0, "out"), b"[0] ", b"begin")
    assert screen.flush(10.0) == b""
    screen.wait_anew()
    assert screen.flush(20.0) == b"" and screen.flush(20.0 + limits.PARTIAL_SECONDS) == b"[0] begin"


def test_long_lines_are_not_kept_back():
    text = Screen().feed((0, "out"), b"[0] ", b"x" * (limits.LINE_BYTES + 1))
    assert text == b"[0] " + b"x" * (limits.LINE_BYTES + 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lost_however_the_pieces_are_cut(seed):
    chance, screen, wrote, pieces = random.Random(seed), Screen(), {}, []
    for _ in range(300):
        rank = chance.randrange(3)
        data = bytes(chance.choice(b"ab\n\r\xff ") for _ in range(chance.randrange(1, 40)))
        wrote[rank] = wrote.get(rank, b"") + data
        pieces.append(screen.feed((rank, "out"), b"<%d>" % rank, data))
        if chance.random() < 0.1:
            pieces.append(screen.flush())
    text = b"".join(pieces) + screen.end()
    found = dict.fromkeys(wrote, b"")
    for part in re.findall(rb"<\d>[^<]*", text):
        found[int(part[1:2])] += part[3:]
    for rank, data in wrote.items():  # a line end of ours stands where a rank's line was interrupted
        left = iter(found[rank])
        assert all(byte in left for byte in data)
        assert len(found[rank]) - len(data) == found[rank].count(b"\n") - data.count(b"\n")


# --- the writers


def pieces_arrived(output, pieces, seconds=20.0):
    """Hand pieces over and wait until all of them have arrived."""
    arrived = threading.Semaphore(0)
    output.written = lambda piece: arrived.release()
    output.start()
    for piece in pieces:
        output.take(piece)
    assert all(arrived.acquire(timeout=seconds) for _ in pieces)
    output.stop()
    output.close()


def test_logs_hold_the_bytes_as_they_came(tmp_path, capfd):
    data = bytes(range(256)) * 10
    pieces_arrived(Output(frozenset(), str(tmp_path)), [Piece(3, "a", s, data) for s in ("out", "err", "out")])
    assert (tmp_path / "rank-3.out").read_bytes() == 2 * data
    assert (tmp_path / "rank-3.err").read_bytes() == data
    assert capfd.readouterr() == ("", "")


def test_more_logs_than_files_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "OPEN_LOGS", 3)
    pieces = [Piece(rank, "a", "out", b"%d\n" % rank) for _ in range(2) for rank in range(10)]
    pieces_arrived(Output(frozenset(), str(tmp_path)), pieces)
    assert [(tmp_path / f"rank-{rank}.out").read_text() for rank in range(10)] == [
        f"{rank}\n" * 2 for rank in range(10)
    ]


def test_a_full_disk_costs_one_warning(tmp_path, capfd):
    (tmp_path / "rank-0.out").symlink_to("/dev/full")
    output = Output(None, str(tmp_path))
    pieces_arrived(output, [Piece(0, "a", "out", b"line\n") for _ in range(5)])
    output.flush()
    out, err = capfd.readouterr()
    assert out.count("[0 a] line") == 5
    assert err.count("is incomplete: No space left on device") == 1


def test_a_non_blocking_reader_gets_everything():
    """O_NONBLOCK belongs to the open file, so that another process may have set it: 80 % of the output was lost."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    program = "for i in range(20000): print('line', i)"
    words = [sys.executable, "-m", "dbrdist_launch", "-n", "1", "python", "-c", program]
    child = subprocess.Popen(words, stdout=write, stderr=subprocess.PIPE, env=environment("nonblock"))
    os.close(write)
    with os.fdopen(read) as reader:
        time.sleep(2.0)
        lines = reader.read().splitlines()
    assert child.wait(60) == 0
    child.stderr.close()
    assert [line.split("] ")[1] for line in lines] == [f"line {i}" for i in range(20000)]


# --- a whole job

pytestmark = pytest.mark.mpiexec


def test_a_slow_reader_holds_the_ranks_up_and_costs_nothing(tmp_path):
    """The launcher's output blocked its pings, and the supervisors then ended a healthy job."""
    program = "for i in range(30000): print('line', i, 'x' * 40)"
    process = popen(
        "-n", 2, "--host-timeout", 1, "--heartbeat-timeout", 1, "--log-dir", tmp_path, "python", "-c", program,
        mark="slow",
    )  # fmt: skip
    time.sleep(6.0)
    assert process.poll() is None  # 3 MB are not in pipes and windows
    wrote = sum(path.stat().st_size for path in (tmp_path / "latest" / "attempt-0").glob("rank-*.out"))
    assert wrote < 3 << 19  # the ranks wait, and nothing piles up
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for rank in range(2):
        mine = re.findall(rf"^\[{rank} \S+\] line (\d+) x{{40}}$", out, re.M)
        assert mine == [str(i) for i in range(30000)]
    assert_nothing_left("slow")


def test_a_reader_that_leaves_costs_its_output_only(tmp_path):
    program = "import time\nfor i in range(50): print('line', i); time.sleep(0.02)\nopen('result', 'w').close()"
    process = popen("-n", 1, "python", "-c", program, mark="head", cwd=tmp_path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    process.stderr.close()
    assert (tmp_path / "result").exists()


@pytest.mark.parametrize(
    "closed", ["1>&-", "2>&-", "1>&- 2>&-", "0<&-", "0<&- 1>&- 2>&-", "1>/dev/full", "2>/dev/full"]
)
def test_closed_and_full_outputs_cost_neither_job_nor_exit_code(tmp_path, closed):
    program = "import sys; print('out'); print('err', file=sys.stderr); open('result', 'w').close(); sys.exit(3)"
    words = f'exec {sys.executable} -m dbrdist_launch -n 1 {sys.executable} -c "{program}" {closed}'
    child = subprocess.run(
        ["sh", "-c", words], cwd=tmp_path, env=environment("closed"), capture_output=True, timeout=60
    )
    assert child.returncode == 3, child.stderr
    assert (tmp_path / "result").exists()
    assert b"Traceback" not in child.stderr
    assert_nothing_left("closed")


def test_an_unfinished_line_is_shown_while_the_rank_runs():
    program = "import sys, time; sys.stdout.write('prompt> '); sys.stdout.flush(); time.sleep(30)"
    process = popen("-n", 1, "python", "-c", program, mark="partial", text=False)
    seen = b""
    while not seen.endswith(b"prompt> "):
        data = os.read(process.stdout.fileno(), 100)
        assert data, seen
        seen += data
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert_nothing_left("partial")


def test_output_of_every_form_arrives_whole(tmp_path):
    program = (
        "import os, random; r = random.Random(int(os.environ['RANK'])); "
        "data = bytes(r.choice(b'ab\\n\\r\\xff\\x00') for _ in range(200000)) + b'x' * 200000 + b'end'; "
        "open('wrote-' + os.environ['RANK'], 'wb').write(data); "
        "left = memoryview(data)\nwhile left: left = left[os.write(1, left[:r.randrange(1, 9000)]):]"
    )
    result = launch("-n", 2, "--log-dir", tmp_path / "logs", "python", "-c", program, cwd=tmp_path, text=False)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        log = tmp_path / "logs" / "latest" / "attempt-0" / f"rank-{rank}.out"
        assert log.read_bytes() == (tmp_path / f"wrote-{rank}").read_bytes()


def test_shown_ranks_timestamps_and_tee(tmp_path):
    program = "import os; print('from', os.environ['RANK'])"
    arguments = ["-n", 4, "--show-ranks", "1-2", "--timestamps", "--tee", tmp_path / "copy"]
    result = launch(*arguments, "python", "-c", program)
    lines = sorted(result.stdout.splitlines())
    assert [re.sub(r"^\d\d:\d\d:\d\d \[(\d) \S+\] from (\d)$", r"\1 \2", line) for line in lines] == ["1 1", "2 2"]
    assert sorted((tmp_path / "copy").read_text().splitlines()) == lines
    assert "expected numbers and ranges" in launch("-n", 1, "--show-ranks", "a", "python", "-c", "").stderr


def test_an_interrupt_gives_up_a_reader_that_never_reads():
    program = "for i in range(30000): print('line', i, 'x' * 40)"
    process = popen("-n", 1, "--grace", 1, "python", "-c", program, mark="never")
    time.sleep(4.0)
    for _ in range(4):  # to the ranks, to the launcher, to its last words
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(2.0)
    assert process.wait(40) == 130
    process.communicate()
    assert_nothing_left("never")


# --- from the program's pipes to the launcher


class Pipes:
    """A rank's two pipes, read by `Outputs` into memory."""

    def __init__(self, credit=1 << 30):
        self.loop, self.pieces, self.writers, pipes = Loop(), [], {}, {}
        for stream in ("out", "err"):
            read, self.writers[stream] = os.pipe()
            pipes[read] = stream
        self.outputs = Outputs(self.loop, pipes, credit, lambda data, stream: self.pieces.append((stream, bytes(data))))

    def turn(self, seconds=0.0):
        self.loop.turn(seconds)
        self.outputs.look(time.monotonic())

    def came(self, stream):
        return b"".join(data for name, data in self.pieces if name == stream)

    def close(self):
        for pipe in [*self.outputs.pipes, *self.writers.values()]:
            os.close(pipe)
        self.loop.close()


def test_pieces_go_out_as_they_come_until_they_are_many():
    pipes = Pipes()
    for number in range(1000):
        os.write(pipes.writers["out"], b"%d\n" % number)
        pipes.turn()
        if number < limits.PIECES:
            assert len(pipes.pieces) == number + 1  # at once
    assert limits.PIECES < len(pipes.pieces) < 100
    while pipes.outputs.gather_until is not None:
        pipes.turn(0.01)
    assert pipes.came("out") == b"".join(b"%d\n" % number for number in range(1000))
    pipes.close()


def test_who_writes_fast_is_not_held_up_by_the_gathering():
    """Each time its pipe has filled meanwhile, it is looked at sooner, until at once."""
    pipes, waits = Pipes(), 0
    for number in range(1, 301):
        os.write(pipes.writers["out"], b"x" * 60000)  # of the 65536 that it holds
        while sum(len(data) for _, data in pipes.pieces) < 60000 * number:
            pipes.turn(0.001)
            waits += pipes.outputs.gather_until is not None
    assert waits < 100  # of a millisecond each; 300 gatherings would be 15000
    pipes.close()


@pytest.mark.parametrize("seed", range(40))
def test_outputs_pass_on_every_byte_whatever_comes_in_between(seed, monkeypatch):
    """Writes, credit, ends of either stream and of the program, in any order."""
    monkeypatch.setattr(limits, "GATHER_SECONDS", 0.003)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(limits, "PIECES", seed % 4)
    chance, pipes, wrote = random.Random(seed), Pipes(credit=3000), {"out": b"", "err": b""}
    for _ in range(400):
        what = chance.choice(["write", "write", "write", "credit", "turn", "turn", "close"])
        stream = chance.choice(["out", "err"])
        if what == "write" and stream in pipes.writers:
            data = chance.randbytes(chance.choice((1, 20, 800)))
            if len(wrote[stream]) - len(pipes.came(stream)) + len(data) < 60000:  # or it would wait
                os.write(pipes.writers[stream], data)
                wrote[stream] += data
        elif what == "credit":
            pipes.outputs.give_credit(chance.randrange(4000))
        elif what == "close" and chance.random() < 0.02 and stream in pipes.writers:
            os.close(pipes.writers.pop(stream))
        pipes.turn(chance.choice((0.0, 0.0, 0.002)))
    pipes.outputs.end()
    for stream in list(pipes.writers):
        os.close(pipes.writers.pop(stream))
    until = time.monotonic() + 10
    while pipes.outputs.pipes and time.monotonic() < until:
        pipes.turn(0.01)
    assert {stream: pipes.came(stream) for stream in wrote} == wrote
    assert not pipes.outputs.pipes and not pipes.outputs.waiting
    pipes.close()
