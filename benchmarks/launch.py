"""Times of dbrdist-launch: start, cost of supervision and of output, restart, and many launches in a row.

    python benchmarks/launch.py --record                            # start, beat, idle, lines, sleepers: 3 minutes
    python benchmarks/launch.py --only cost,restart,many [--openmpi-python PYTHON] [--launches 200]

`restart` and the two-host part of `many` need root (namespaces). Figures to reach: first line of 4 ranks within
mpiexec's own time + 0.2 s; supervision of an idle rank under 8 MB and 0.1 % of a core, under 0.5 % of a step of 10 ms;
10^5 lines a second with at most 1.2 times plain mpiexec's processor time, the live view for 2 % of a core more; 64
sleepers start and end within 10 s; first new rank within 5 s of a failed attempt's end; no launch of 200 that leaves
something behind or hangs unnoticed.
"""

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

import harness

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "launch"))
from fake_cluster import FakeCluster  # noqa: E402
from fake_cluster import missing as no_hosts  # noqa: E402
from support import PROGRAMS, attempts_in, environment, marked  # noqa: E402

STEP = """
import time
from mpi4py import MPI
from dbrdist_launch import heartbeat
world, seconds = MPI.COMM_WORLD, []
def work(turns):
    for _ in range(turns):
        pass
turns = 10000
best = []
for _ in range(200):  # the same amount of work for 10 ms on an undisturbed core
    start = time.perf_counter()
    work(turns)
    best.append(time.perf_counter() - start)
turns = world.allreduce(int(turns * 0.010 / min(best)), MPI.MIN)
for step in range(500):
    start = time.perf_counter()
    work(turns)
    world.allreduce(1)
    heartbeat.beat(step, loss=0.5)
    seconds.append(time.perf_counter() - start)
if world.rank == 0:
    print("STEP", sorted(seconds)[250] / turns * 1e6, sum(seconds) / 500, flush=True)
"""
BEAT = """
import time
from dbrdist_launch import heartbeat
assert heartbeat.active()
start = time.perf_counter()
for step in range(100000):
    heartbeat.beat(step, loss=0.5, total=100000)
print("BEAT", (time.perf_counter() - start) / 100000, flush=True)
"""
LINES = """
import os, sys, time
kind, rate, start = sys.argv[1], float(sys.argv[2]), time.perf_counter()
for begin in range(0, 1 << 40, 100):
    lines = [b"line %d %s\\n" % (i, b"x" * 40) for i in range(begin, begin + 100)]
    if kind == "block":
        os.write(1, b"".join(lines))
    else:
        for line in lines:
            os.write(1, line)
    time.sleep(max(0.0, (begin + 100) / rate - (time.perf_counter() - start)))
"""
RATE = 100000  # lines a second of all ranks


def summary(values, digits=4):
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "repeats": len(values),
    }


def run(python, arguments, env=None, wrap=(), timeout=120):
    """(seconds to the first line, seconds to the end, output, exit code) of a launcher's run."""
    mark = uuid.uuid4().hex
    words = [*wrap, python, "-m", "dbrdist_launch", *map(str, arguments)]
    started = time.perf_counter()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(mark, **(env or {})),
    )  # fmt: skip
    first = process.stdout.readline()
    to_first = time.perf_counter() - started
    rest = process.stdout.read()  # not communicate(), which knows nothing of what readline has buffered
    process.wait(timeout)
    return to_first, time.perf_counter() - started, first + rest, process.returncode, mark


def start(pythons, repeats):
    """First line of 4 ranks: bare mpiexec and supervised, in turns."""
    found = {}
    for name, python in pythons.items():
        program = [python, "-c", "print('first', flush=True)"]
        bare_words = subprocess.run(
            [python, "-m", "dbrdist_launch", "-n", "4", "--bare", "--print", *program],
            env=environment("x"), capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        bare, supervised, printed = [], [], []
        for _ in range(repeats):
            began = time.perf_counter()
            child = subprocess.Popen(shlex.split(bare_words), stdout=subprocess.PIPE, env=environment("x"))
            child.stdout.readline()
            bare.append(time.perf_counter() - began)
            child.communicate()
            supervised.append(run(python, ["-n", 4, *program])[0])
            began = time.perf_counter()
            subprocess.run(
                [python, "-m", "dbrdist_launch", "-n", "4", "--print", *program],
                env=environment("x"),
                capture_output=True,
            )
            printed.append(time.perf_counter() - began)
        added = [two - one for one, two in zip(bare, supervised)]
        found[name] = {
            "mpiexec_seconds": summary(bare), "launch_seconds": summary(supervised), "added_seconds": summary(added),
            "launcher_alone_seconds": summary(printed),
        }  # fmt: skip
    return found


def cost(pythons, repeats):
    """A step of 10 ms on 2 ranks with a beat each, bare and supervised, in turns; and supervision's processor time.

    The step's time varies by some percent on a shared machine; processor time does not, so the second is what counts.
    """
    found = {}
    for name, python in pythons.items():
        turns = {"bare": [], "supervised": []}
        for _ in range(repeats):
            for kind, more in (("bare", ["--bare"]), ("supervised", [])):
                out = run(python, ["-n", 2, *more, python, "-c", STEP])[2]
                words = next(line for line in out.splitlines() if "STEP" in line).split("STEP ")[1].split()
                turns[kind].append(float(words[0]))
        share = [two / one - 1 for one, two in zip(turns["bare"], turns["supervised"])]
        supervisors, launcher = processor_shares(python, 10.0)
        found[name] = {
            "bare_seconds_per_million_turns": summary(turns["bare"], 6),
            "supervised_seconds_per_million_turns": summary(turns["supervised"], 6),
            "added_fraction": summary(share, 5),
            "supervisor_processor_fraction_per_rank": supervisors,
            "launcher_processor_fraction": launcher,
        }
    return found


def processor_shares(python, seconds):
    """(of the two supervisors of a rank, of the launcher): processor time over time, while 2 ranks step and beat."""
    mark = uuid.uuid4().hex
    words = [python, "-m", "dbrdist_launch", "-n", "2", python, "-c", STEP.replace("range(500)", "range(100000)")]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment(mark))
    time.sleep(4.0)
    lines = [line for line in marked(mark) if "rank/main.py" in line or "-m dbrdist" in line]
    watched = {line.split()[0]: "rank/main.py" in line for line in lines}
    watched = {pid: mine for pid, mine in watched.items() if "mpiexec" not in command_of(pid)}
    before = {pid: ticks(pid) for pid in watched}
    time.sleep(seconds)
    used = {pid: (ticks(pid) - before[pid]) / os.sysconf("SC_CLK_TCK") / seconds for pid in watched}
    process.terminate()
    process.wait()
    supervisors = [share for pid, share in used.items() if watched[pid]]
    launcher = [share for pid, share in used.items() if not watched[pid]]
    return round(sum(supervisors) / 2, 5), round(sum(launcher), 5)


def command_of(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def ticks(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def used(mark):
    """Seconds of processor time of each thread of a job, to the microsecond: {thread: (seconds, command)}."""
    found = {}
    for line in marked(mark):
        pid, _, command = line.partition(" ")
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found[task.name] = (int((task / "schedstat").read_text().split()[0]) / 1e9, command)
    return found


def is_program(command):
    return "-c" in command.split() and not any(word in command for word in ("mpiexec", "dbrdist", "hydra"))


def shares(words, seconds, ranks=2):
    """{"program": share of a core, "rest": share} of a job that runs until it is ended."""
    mark = uuid.uuid4().hex
    # Into a pipe as under a batch system's shell; unbuffered Python is the user's affair and the same for both.
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=reader.stdin, stderr=subprocess.DEVNULL, env=environment(mark)
    )
    reader.stdin.close()
    while sum(value > 0.1 and is_program(command) for value, command in used(mark).values()) < ranks:
        time.sleep(0.1)
    time.sleep(1.0)
    before = used(mark)
    time.sleep(seconds)
    after = used(mark)
    process.terminate()
    process.wait()
    reader.wait()
    found = {"program": 0.0, "rest": 0.0}
    for thread, (value, command) in after.items():
        found["program" if is_program(command) else "rest"] += (value - before.get(thread, (value, ""))[0]) / seconds
    return found


def lines(pythons, repeats):
    """2 ranks that write 10^5 lines a second: processor time of the whole job, against plain mpiexec, in turns."""
    python, found = next(iter(pythons.values())), {}
    for kind in ("line", "block"):
        program = [python, "-c", LINES, kind, str(RATE / 2)]
        ours = [python, "-m", "dbrdist_launch", "-n", "2"]
        bare = subprocess.run(
            [*ours, "--bare", "--print", *program], env=environment("x"), capture_output=True, text=True, check=True
        ).stdout
        kinds = {"mpiexec": shlex.split(bare), "launch": [*ours, *program], "view": [*ours, "--view", *program]}
        rows = [{name: shares(words, 3.0) for name, words in kinds.items()} for _ in range(repeats)]
        whole = [{name: row[name]["program"] + row[name]["rest"] for name in row} for row in rows]
        found[f"one write for each {kind}" + (" of 100" if kind == "block" else "")] = {
            "mpiexec_core_fraction": summary([row["mpiexec"] for row in whole]),
            "launch_core_fraction": summary([row["launch"] for row in whole]),
            "ratio": summary([row["launch"] / row["mpiexec"] for row in whole], 3),
            "passing_on_core_fraction": summary([row["launch"]["rest"] for row in rows]),
            "view_adds_core_fraction": summary([row["view"]["rest"] - row["launch"]["rest"] for row in rows]),
        }
    return found


def idle(pythons, seconds=15.0, ranks=8):
    """Private memory and processor time of a sleeping rank's two supervisors."""
    python, mark = next(iter(pythons.values())), uuid.uuid4().hex
    words = [python, "-m", "dbrdist_launch", "-n", str(ranks), "sleep", "100"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment(mark))
    time.sleep(6.0)
    pids = [line.split()[0] for line in marked(mark) if "rank/main.py" in line and "mpiexec" not in line.split()[1]]
    pids = [pid for pid in pids if "python" in command_of(pid)]
    before = used(mark)
    time.sleep(seconds)
    after = used(mark)
    private = sum(private_bytes(pid) for pid in pids)
    process.terminate()
    process.wait()
    spent = sum(after[pid][0] - before[pid][0] for pid in pids)
    return {
        "ranks": ranks, "supervisors": len(pids), "private_megabytes_per_rank": round(private / ranks / 1e6, 2),
        "core_fraction_per_rank": round(spent / seconds / ranks, 6),
    }  # fmt: skip


def private_bytes(pid):
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def sleepers(pythons, repeats):
    """64 ranks that sleep for a second, from start to end."""
    python = next(iter(pythons.values()))
    return summary([run(python, ["-n", 64, "sleep", 1])[1] for _ in range(repeats)], 2)


def beat(pythons, repeats):
    """One heartbeat, in seconds."""
    python = next(iter(pythons.values()))
    values = [float(run(python, ["-n", 1, python, "-c", BEAT])[2].split("BEAT ")[1]) for _ in range(repeats)]
    return summary(values, 8)


def restart(pythons, repeats):
    """From the end of an attempt that lost a host to the first rank of the next one, on the host that is left."""
    if no_hosts():
        return {"not_run": no_hosts()}
    found = {}
    for name, python in pythons.items():
        values = []
        with FakeCluster(2) as cluster:
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as folder:
                    path = pathlib.Path(folder)
                    words = ["--ssh", cluster.ssh, "--hosts", "node0:2,node1:2", "-n", 4, "--max-restarts", 3]
                    words += ["--log-dir", folder, "--env", f"TEST_FOLDER={folder}", "--env", "TEST_STEPS=300"]
                    words += [python, PROGRAMS / "counting.py"]
                    process = subprocess.Popen(
                        cluster.inside(python, "-m", "dbrdist_launch", *words), env=environment("restart"),
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    )  # fmt: skip
                    while not (path / "checkpoint.json").exists():
                        time.sleep(0.05)
                    cluster.kill_node(1)
                    process.wait(timeout=120)
                    cluster.restart_node(1)
                    attempts = attempts_in(path)
                    values.append(attempts[1]["seconds_from_last_end_to_first_rank"])
        found[name] = summary(values, 3)
    return found


def many(pythons, launches, over_hosts):
    """Launches in a row; counts what did not end with 0, what was retried, and what was left behind."""
    found = {}
    for name, python in pythons.items():
        found[name] = _row(python, ["-n", 4, python, PROGRAMS / "hello.py"], launches, ())
        if over_hosts and not no_hosts():
            with FakeCluster(2) as cluster:
                words = ["--ssh", cluster.ssh, "--hosts", "node0:2,node1:2", python, PROGRAMS / "hello.py"]
                found[name + " two hosts"] = _row(python, words, over_hosts, cluster.inside())
    return found


def _row(python, arguments, launches, wrap):
    seconds, bad, retried, left = [], [], 0, []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(launches):
            _, total, out, code, mark = run(python, arguments, {"TMPDIR": folder}, wrap, timeout=200)
            seconds.append(total)
            retried += out.count("trying the start again")
            if code or out.count("hello from rank") != 4:
                bad.append(out[-2000:])
            until = time.monotonic() + 3
            while marked(mark) and time.monotonic() < until:
                time.sleep(0.02)
            left += marked(mark)
        files = os.listdir(folder)
    return {
        "launches": launches, "seconds": summary(seconds), "not_right": len(bad), "hung_starts_retried": retried,
        "processes_left": len(left), "files_left": len(files), "first_wrong": bad[:1], "names_left": (left + files)[:5],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="start,beat,idle,lines,sleepers", help="also: cost, restart, many")
    parser.add_argument("--openmpi-python", default=os.environ.get("TEST_OPENMPI_PYTHON"), help="one with Open MPI")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--over-hosts", type=int, default=50)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    options = parser.parse_args()
    python = options.openmpi_python
    pythons = {"mpich": sys.executable, **({"openmpi": python} if python else {})}
    parts = {
        "start": lambda: start(pythons, options.repeats),
        "beat": lambda: beat(pythons, 5),
        "idle": lambda: idle(pythons),
        "lines": lambda: lines(pythons, max(3, options.repeats // 3)),
        "sleepers": lambda: sleepers(pythons, 3),
        "cost": lambda: cost(pythons, max(3, options.repeats // 2)),
        "restart": lambda: restart(pythons, 5),
        "many": lambda: many(pythons, options.launches, options.over_hosts),
    }
    results, load = {}, os.getloadavg()[0]
    for name in options.only.split(","):
        results[name] = parts[name]()
        print(name, json.dumps(results[name], indent=1), flush=True)
    if options.record:
        settings = {"repeats": options.repeats, "load_at_start": load, "load_at_end": os.getloadavg()[0]}
        print(harness.record("launch", settings, results))


if __name__ == "__main__":
    main()
