"""What the ranks write: every byte arrives, in order, in its log and on the screen, and slow readers stop nobody."""

import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from support import assert_nothing_left, environment, launch, popen, wait_until

pytestmark = pytest.mark.mpiexec


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
    found = [re.sub(r"^\d\d:\d\d:\d\d \[(\d) \S+\] from (\d)$", r"\1 \2", line) for line in lines]
    assert sorted(found) == ["1 1", "2 2"]
    assert sorted((tmp_path / "copy").read_text().splitlines()) == lines
    assert "expected numbers and ranges" in launch("-n", 1, "--show-ranks", "a", "python", "-c", "").stderr


def is_full(pipe):
    """Whether who writes would wait: all pages are taken, some of them perhaps in part."""
    end = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)


def test_an_interrupt_gives_up_a_reader_that_never_reads():
    program = "for i in range(30000): print('line', i, 'x' * 40)"
    process = popen("-n", 1, "--grace", 1, "python", "-c", program, mark="never")
    wait_until(lambda: is_full(process.stdout))  # the launcher's writer stands still
    for _ in range(4):  # to the ranks, to the launcher, to its last words
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(2.0)
    assert process.wait(40) == 130
    process.communicate()
    assert_nothing_left("never")
