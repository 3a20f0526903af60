"""A real training job (digits) on two fake hosts, killed at random many times under --max-restarts.

    sudo python tests/launch/random_kills.py [--kills 20] [--host-kills 0] [--epochs 60] [--seed 0]

The final state (weights, optimizer, order, log; not the times) must equal that of an undisturbed run, bit for bit,
when only ranks were killed: each start has the same number of ranks. After a lost host (--host-kills) the job goes on
with fewer ranks, whose sums round differently; it must finish, and use the host again when it is back.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import uuid

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fake_cluster import FakeCluster
from support import MARK, ROOT, attempts_in, environment, marked

TRAIN = "import sys; from dbrdist.cli.train import main; sys.argv[0] = 'dbrdist-train'; sys.exit(main())"
CONFIG = ROOT / "examples" / "digits" / "config.yaml"


def command(cluster, folder, epochs, restarts):
    """The launcher's words for one training job in a folder."""
    words = [sys.executable, "-m", "dbrdist_launch", "--ssh", cluster.ssh, "--hosts", "node0:2,node1:2", "-n", 4]
    words += ["--max-restarts", restarts, "--cooldown", 0, "--log-dir", folder / "logs", "--host-timeout", 4]
    words += ["--env", f"PYTHONPATH={ROOT}:{ROOT / 'launch'}", "--env", "OMP_NUM_THREADS=1"]
    words += [sys.executable, "-c", TRAIN, CONFIG, "--resume", f"out={folder / 'run'}", f"epochs={epochs}"]
    return cluster.inside(*words, "snapshot.every=20 iteration")


def ranks(mark):
    """Process ids of the programs, without supervisors."""
    found = []
    for line in marked(mark):
        pid, _, text = line.partition(" ")
        if (
            "dbrdist.cli.train" in text
            and "rank/main.py" not in text
            and "dbrdist_launch" not in text
            and "mpiexec" not in text
        ):
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
    return found


def attempts(folder):
    with contextlib.suppress(OSError, ValueError):
        return len(attempts_in(folder / "logs"))
    return 0


def newest(folder):
    """The number of the newest snapshot, to see that a start makes progress."""
    return max((path.stat().st_mtime_ns for path in (folder / "run").glob("snapshot*")), default=0)


def disturbed(cluster, folder, options):
    """Run with kills; returns (exit code, kinds of kills done)."""
    chance, mark, done = random.Random(options.seed), uuid.uuid4().hex, []
    kinds = ["rank"] * options.kills + ["host"] * options.host_kills
    chance.shuffle(kinds)
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            command(cluster, folder, options.epochs, len(kinds) + 5), env=environment(mark), cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        for kind in kinds:
            tried = attempts(folder)
            for _ in range(chance.choice([1, 2])):  # snapshots of this start: it makes progress
                before, until = newest(folder), time.monotonic() + 60
                while newest(folder) == before and process.poll() is None and time.monotonic() < until:
                    time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.1))
            if process.poll() is not None:
                break
            if kind == "host":
                cluster.kill_node(1)
            else:
                victims = ranks(mark)
                if victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(victims), 9)
            done.append(kind)
            while attempts(folder) == tried and process.poll() is None:
                time.sleep(0.02)
            if kind == "host":
                cluster.restart_node(1)
        code = process.wait(timeout=600)
    return code, done


# What a line of the log measures, and so never holds twice.
MEASURED = {
    "elapsed_time",
    "examples_per_second",
    "data_wait_fraction",
    "memory_bytes",
    "time",
    "communication_fraction",
}


def state(folder):
    """All arrays of the newest snapshot by name, and the log, without what is measured."""
    last = max((folder / "run").glob("snapshot*"), key=lambda path: path.stat().st_mtime_ns)
    with np.load(last, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    del arrays["_snapshot_elapsed_time"]
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert lines, "the log is empty"
    kept = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
    arrays["log.jsonl"] = np.array(json.dumps(kept))
    return arrays


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--host-kills", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with FakeCluster(2) as cluster, tempfile.TemporaryDirectory(prefix="random-kills-") as name:
        quiet, loud = pathlib.Path(name) / "undisturbed", pathlib.Path(name) / "disturbed"
        quiet.mkdir()
        loud.mkdir()
        started = time.monotonic()
        plain = subprocess.run(
            command(cluster, quiet, options.epochs, 0),
            env=environment("quiet"),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert plain.returncode == 0, plain.stdout + plain.stderr
        print(f"undisturbed: {time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
        code, done = disturbed(cluster, loud, options)
        text = (loud / "output.txt").read_text()
        assert code == 0, text[-5000:]
        print(f"killed {len(done)} times ({done.count('host')} hosts): {time.monotonic() - started:.1f} s", flush=True)
        one, other = state(quiet), state(loud)
        shared = sorted(set(one) & set(other))  # a snapshot of fewer ranks has fewer entries of ranks
        ours = [key for key in shared if not np.array_equal(one[key], other[key])]
        print(f"{len(shared)} arrays of the last snapshot but times, {len(ours)} differ: {ours[:5]}", flush=True)
        for folder in (quiet, loud):
            print(folder.name, (folder / "run" / "summary.json").read_text().replace("\n", " ")[:300], flush=True)
        all_done = len(done) == options.kills + options.host_kills
        same = not ours and len(shared) == len(one) == len(other)
        sys.exit(0 if all_done and (same or options.host_kills) else 1)


if __name__ == "__main__":
    main()
