"""Many healthy jobs in odd circumstances, drawn at random: none may be harmed.

    python tests/launch/healthy_runs.py [--runs 500] [--seed 14] [--at-once 2] [--record]

Each run must end with the program's own code, and its output must be whole.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support import ROOT, assert_nothing_left, environment

sys.path.insert(0, str(ROOT / "benchmarks"))
import harness

LINES = "for i in range({count}): print('line', i)\n"
PYTHON = sys.executable
PROGRAMS = {
    "slow reader": LINES.format(count=20000),
    "launcher stopped and continued": "import time\nfrom dbrdist_launch import heartbeat\nfor i in range(30):\n"
    "    heartbeat.beat(i); print('line', i); time.sleep(0.1)\n",
    "handled failure in a wrapper": LINES.format(count=10),
    "helper ended by its program": "import subprocess, time\np = subprocess.Popen(['sleep', '100'])\ntime.sleep(0.5)\n"
    "p.terminate()\ntime.sleep(2.5)\n" + LINES.format(count=10),
    "slow exit": "import atexit, sys, time\natexit.register(time.sleep, 1.5)\n"
    "class Late:\n    def __del__(self, s=time.sleep): s(1.5)\nlate = Late()\n" + LINES.format(count=10),
    "a thread that dies": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\n"
    + LINES.format(count=10),
    "odd beats": "from dbrdist_launch import heartbeat\nfor s in (0.5, 'x', None, 1 << 90): heartbeat.beat(s, a=dir)\n"
    + LINES.format(count=10),
    "strangers at the port": LINES.format(count=10),
    "signals of the terminal": "import time\ntime.sleep(1.5)\n" + LINES.format(count=10),
    "progress bars": "import sys\nfor i in range(3000): sys.stderr.write(f'\\r{i}%')\n" + LINES.format(count=10),
    "late ranks": "import os, time\ntime.sleep(1.5 * int(os.environ['RANK']))\n" + LINES.format(count=10),
    "mpi with a rank that waits": "import time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 0: time.sleep(2)\n"
    + LINES.format(count=10),
    "a caught exit": "import sys\nfrom mpi4py import MPI\ntry:\n    sys.exit(3)\nexcept SystemExit:\n    pass\n"
    + LINES.format(count=10),
}


def run(kind, seed, folder):
    """One run; what was wrong with it, or ''."""
    chance, mark, program = random.Random(seed), uuid.uuid4().hex, pathlib.Path(folder) / f"{seed}.py"
    program.write_text(PROGRAMS[kind])
    ranks = chance.choice((1, 2, 3))
    words = [PYTHON, "-m", "dbrdist_launch", "-n", ranks, "--heartbeat-timeout", 2, "--host-timeout", 2]
    command, port = [PYTHON, program], None
    if kind == "handled failure in a wrapper":
        command = ["bash", "-c", f"{PYTHON} -c 'import nope' 2>/dev/null || true; {PYTHON} {program}"]
    if kind == "strangers at the port":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words += ["--port", port]
    if kind == "signals of the terminal":
        words = ["nohup", *words]
    words = list(map(str, [*words, *command]))
    process = subprocess.Popen(
        words, env=environment(mark), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started = time.monotonic()
    disturb(kind, process, chance, port)
    out, err = process.communicate(timeout=120)
    assert_nothing_left(mark, 10.0)
    count = 20000 if kind == "slow reader" else 30 if kind.startswith("launcher") else 10
    for rank in range(ranks):
        mine = re.findall(rb"^\[%d \S+\] line (\d+)$" % rank, out, re.M)
        if process.returncode or mine != [b"%d" % i for i in range(count)]:
            seconds, said = time.monotonic() - started, err.decode(errors="replace")[-2000:]
            wrote = f"rank {rank} wrote {len(mine)} lines of {count}"
            return f"{kind}, seed {seed}: code {process.returncode}, {wrote}, {seconds:.0f} s\n{said}"
    return ""


def disturb(kind, process, chance, port):
    """What happens to the launcher meanwhile."""
    if kind == "slow reader":
        time.sleep(chance.uniform(3.0, 6.0))
    elif kind.startswith("launcher"):
        time.sleep(chance.uniform(0.5, 2.0))
        process.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(2.0, 5.0))
        process.send_signal(signal.SIGCONT)
    elif kind == "signals of the terminal":
        time.sleep(chance.uniform(0.4, 1.5))
        process.send_signal(signal.SIGHUP)
    elif port is not None:
        for _ in range(30):
            try:
                with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                    connection.sendall(bytes(chance.choices(b'{}[]"\\:,\n\xff0', k=chance.randrange(1, 3000))))
            except OSError:
                time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    kinds = [chance.choice(sorted(PROGRAMS)) for _ in range(options.runs)]
    done, until = collections.Counter(), time.monotonic() + options.seconds
    bad = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:

        def one(number):
            if time.monotonic() < until:
                done[kinds[number]] += 1
                return run(kinds[number], options.seed * 100000 + number, folder)
            return ""

        for found in pool.map(one, range(options.runs)):
            if found:
                bad.append(found)
                print(found, flush=True)
    for kind, count in sorted(done.items()):
        print(f"{count:4d} {kind}")
    print(f"{sum(done.values())} healthy runs, {len(bad)} harmed")
    if options.record:
        results = {"runs": sum(done.values()), "harmed": len(bad), "by_kind": dict(sorted(done.items())), "harms": bad}
        print(harness.record("launch-healthy", {"seed": options.seed, "at_once": options.at_once}, results))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
