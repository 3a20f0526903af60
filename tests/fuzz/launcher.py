"""Random jobs under dbrdist-launch, of which it is known how they end and what they write.

    python -m tests.fuzz.launcher --jobs 1000 --seed 0

Each job has a random number of ranks, random output and ends, odd arguments and variables, inherited signals and
limits, and disturbances: somebody asks for stacks, a reader is slow, the whole job is suspended. What must hold: each
byte of each rank arrives, in the log and on the screen; the exit code and the rank that is blamed are right; the
arguments, the variables and the state of the ranks are those that were given; nothing is left behind, and nothing
hangs. A job that fails is printed with its number: `--only NUMBER` runs it again. `--plant NAME` runs a copy of the
launcher that is broken in a known way, which must be found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "launch"), str(ROOT / "tests" / "launch")]

from dbrdist_launch import linux  # noqa: E402
from support import assert_nothing_left, environment  # noqa: E402

PROGRAM = r"""
import json, os, random, signal, sys, time
given = sys.argv[1:]
is_quiet = given[0] == "--quiet"  # an option of the launcher's too
spec = json.loads(given.pop(0 if not is_quiet else 1))
rank = int(os.environ["RANK"])
mine = spec["ranks"][rank]
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
seen = {"words": given, "blocked": status["SigBlk"].strip(), "odd": os.environ.get("ODD"),
        "path": os.environ.get("PYTHONPATH"), "unbuffered": os.environ.get("PYTHONUNBUFFERED")}
def leaves():
    file = open(f"kept-{rank}", "w")
    file.write("whole")
    sys.exit(3)
try:
    leaves()
except SystemExit:
    pass
seen["kept"] = open(f"kept-{rank}").read()
seen["ignored"] = status["SigIgn"].strip()
if spec["input"] is not None and rank == 0:
    import hashlib
    seen["input"] = hashlib.sha256(sys.stdin.buffer.read()).hexdigest()
import resource
seen["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
with open(f"seen-{rank}", "w") as file:
    json.dump(seen, file)
if spec["mpi"]:
    from mpi4py import MPI
    MPI.COMM_WORLD.barrier()
chance = random.Random(mine["seed"])
for how, size in mine["writes"]:
    data = bytes(chance.choices(b"abc xyz\n\r\0\xff", k=size))
    if how == "call":
        view = memoryview(data)
        while view:
            view = view[os.write(1, view):]
    elif how == "one call":
        os.write(1, data)
    elif how == "error":
        os.write(2, data.replace(b"\n", b"-") + b"\xff\n")
    elif how == "buffer":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        print(data.decode("latin-1").encode("ascii", "replace").decode(), end="")
        sys.stdout.flush()
if spec["beats"]:
    from dbrdist_launch import heartbeat
    for step in range(spec["beats"]):
        heartbeat.beat(step)
        time.sleep(0.02)
    if spec["disturb"] == "stop":  # it is stopped between two beats, for longer than one may be late
        while not os.path.exists("stopped"):
            time.sleep(0.02)
        time.sleep(1.5)  # the launcher asks once a second
    heartbeat.pause()
if spec["spawns"] and rank == 0:
    from mpi4py import MPI
    child = MPI.COMM_SELF.Spawn(sys.executable, ["-c", spec["spawns"]])
    child.recv(source=0)
    child.Disconnect()
end = mine["end"]
if end == "exit":
    sys.exit(mine["code"])
elif end == "exception":
    raise ValueError(f"odd {rank}")
elif end == "kill":
    os.kill(os.getpid(), mine["code"])
    time.sleep(60)
elif end == "wait":
    time.sleep(600)
elif end == "hard":
    os._exit(mine["code"])
elif end == "early":  # the others wait for it, and mpiexec ends them
    os._exit(0)
elif end == "wait for it":
    MPI.COMM_WORLD.barrier()
"""

SPAWNED = (
    "from mpi4py import MPI; print('zz spawned zz', flush=True); up = MPI.Comm.Get_parent(); up.send(1, 0); "
    "up.Disconnect()"
)
# A shell before the program, which changes no signal.
SHELL = ("sh", "-c", 'grep SigIgn /proc/$$/status > "ignored-$RANK"; exec "$@"', "sh")


# name -> (file, what stands there, what stands there in the broken copy)
PLANTS = {
    "bytes-lost": (
        "rank/outputs.py", "self.send(self._piece[:count],", "self.send(self._piece[: count - count // 999],"),
    "mask-kept": ("inherited.py", "signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)", "pass"),
    "limit-kept": ("inherited.py", "resource.setrlimit(resource.RLIMIT_NOFILE, self.files)", "pass"),
    "code-cut": ("codes.py", "return os.WEXITSTATUS(status), 0", "return os.WEXITSTATUS(status) & 2, 0"),
    "wrong-rank": ("launcher/judgement/judge.py", "return self._of_exit(rank)", "return self._of_exit(self.ranks[0])"),
    "path-kept": (
        "rank/inject/sitecustomize.py", 'os.environ["PYTHONPATH"] = os.pathsep.join(entries)', "pass"),
    "filters-cut": ("limits.py", "FILTER_SECONDS = 60.0", "FILTER_SECONDS = 0.05"),
    "words-lost": (
        "rank/child.py", "os.execve(command[0], command,", "os.execve(command[0], [w for w in command if w],"),
    "size-signal-ignored": ("inherited.py", "kept = number == signal.SIGXFSZ and self.ignores_size", "kept = True"),
    "spawned-lost": (
        "launcher/streams/starter_output.py", 'self.show(Piece(SPAWNED,', 'print if 1 else (Piece(SPAWNED,'),
    "stop-counted": ("rank/supervisor.py", "if now - self.woke_at > 2 * limits.FROZEN_SECONDS:", "if False:"),
    "exit-kept": (
        "rank/inject/sitecustomize.py", "error._dbrdist_exit = _Exit(error.code, codes)", "codes.append(error)"),
    "half-letters": ("wire.py", 'return data.decode("utf-8", "backslashreplace")', "return value"),
    "early-unnamed": ("launcher/judgement/report.py", "gone = _first_to_go(ranks, size)", "gone = None"),
    "option-taken": ("launcher/cli.py", "self._end_at_module(ctx, args))", "args)"),
    "events-cut": ("launcher/running/attempt.py", 'self.events.tell("rank_ended"', 'rank.rank or self.events.tell("x"'),
    "input-cut": ("launcher/streams/input.py", "self.channel.send(In(data))", "self.channel.send(In(data[:999]))"),
    "variable-lost": ("rank/surroundings.py", 'found["DBRDIST_LAUNCH"] = "1"', 'found.pop("ODD", None)'),
}  # fmt: skip


def broken(plant: tuple[str, str, str], place: pathlib.Path) -> pathlib.Path:
    """A folder with a copy of the launcher that has a planted fault."""
    file, old, new = plant
    shutil.copytree(ROOT / "launch" / "dbrdist_launch", place / "dbrdist_launch")
    text = (place / "dbrdist_launch" / file).read_text()
    assert old in text, f"{file} has no {old!r} any more"
    (place / "dbrdist_launch" / file).write_text(text.replace(old, new))
    return place


def written(mine: dict[str, Any]) -> bytes:
    """What a rank writes."""
    chance, found = random.Random(mine["seed"]), b""
    for how, size in mine["writes"]:
        data = bytes(chance.choices(b"abc xyz\n\r\0\xff", k=size))
        if how == "error":
            continue
        found += data.decode("latin-1").encode("ascii", "replace") if how == "print" else data
    return found


def given_input(job: dict[str, Any]) -> bytes:
    """What stands on the launcher's stdin."""
    return random.Random(job["ranks"][0]["seed"]).randbytes(job["input"] or 0)


def make(seed: str) -> dict[str, Any]:
    """A random job."""
    chance = random.Random(seed)
    count = chance.choice([1, 2, 2, 3, 4])
    sizes = [0, 1, 10, 1000, 5000, 70_000, 300_000]
    ranks: list[dict[str, Any]] = []
    for _ in range(count):
        kinds = ["call", "one call", "buffer", "print", "error"]
        writes = [(chance.choice(kinds), chance.choice(sizes)) for _ in range(chance.randrange(4))]
        ranks.append({"seed": chance.random(), "writes": writes, "end": "return", "code": 0})
    culprit = chance.randrange(count) if chance.random() < 0.5 else None
    if culprit is not None:
        end = chance.choice(["exit", "exception", "kill", "hard"])
        code = {"exit": chance.choice([1, 3, 9, 255]), "hard": chance.choice([2, 137]), "exception": 1}
        ranks[culprit].update(end=end, code=code.get(end, chance.choice([9, 11, 15])))
        for number, rank in enumerate(ranks):
            if number != culprit:
                rank["end"] = "wait"
    job = {
        "ranks": ranks, "culprit": culprit, "mpi": chance.random() < 0.3,
        "beats": chance.choice([0, 0, 20]),
        "words": [chance.choice(["a", "", "x y", ":", "-n", "é", "--flag=1", "'\"", "a\nb"]) for _ in range(3)],
        "odd": chance.choice([None, "", "a\nb", "x=y;z", "é"]), "files": chance.choice([None, 64, 256]),
        "blocked": chance.choice([[], [], [signal.SIGCHLD], [signal.SIGUSR1, signal.SIGTERM]]),
        "unbuffered": chance.choice([None, None, "1", "0", ""]), "python_path": chance.choice([None, "/a:/b"]),
        "disturb": chance.choice([None, None, "stacks", "slow", "stop"]), "filter": chance.random() < 0.15,
        "ignored": chance.choice([[], [], [signal.SIGUSR2]]),
        "module": chance.random() < 0.2, "shell": chance.random() < 0.3, "spawns": None,
    }  # fmt: skip
    if culprit is not None and count > 1 and chance.random() < 0.2:
        job["mpi"] = True
        for number, rank in enumerate(ranks):
            rank.update(end="early" if number == culprit else "wait for it", code=0)
    if culprit is None and chance.random() < 0.15:
        job |= {"mpi": True, "spawns": SPAWNED}
    if culprit is not None and ranks[culprit]["end"] == "kill":
        job["blocked"] = [number for number in job["blocked"] if number != ranks[culprit]["code"]]
    job["input"] = chance.choice([None, None, None, 0, 1000, 3_000_000])  # bytes on stdin
    if job["disturb"] == "stop":
        job["filter"] = False  # the kernel sends SIGHUP to a stopped process whose session leader has ended
    return job


def state_of(job: dict[str, Any]) -> None:
    """In the launcher's process, before it begins."""
    import resource

    if job["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (job["files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, job["blocked"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # this Python ignores some
        signal.signal(number, signal.SIG_IGN if number in job["ignored"] else signal.SIG_DFL)


def start(
    job: dict[str, Any], folder: pathlib.Path, name: str, mark: str, launcher: pathlib.Path
) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROGRAM)
    env = environment(mark)
    env["PYTHONPATH"] = str(launcher) + (":" + job["python_path"] if job["python_path"] else "")
    for variable, value in (("ODD", job["odd"]), ("PYTHONUNBUFFERED", job["unbuffered"])):
        env.pop(variable, None)
        env |= {variable: value} if value is not None else {}
    command = [sys.executable, "program.py", json.dumps(job), *job["words"]]
    if job["module"]:
        command = ["-m", "program", "--quiet", *command[2:]]
        env["PYTHONPATH"] += f":{folder}"
    if job["module"] and (job["filter"] or job["shell"]):
        command = [sys.executable, *command]
    if job["shell"]:
        command = [*SHELL, *command]
    if job["filter"]:
        command = ["bash", "-c", 'exec > >(sleep 0.5; exec cat); exec "$@"', "bash", *command]
    command = command if command[0] == "-m" else ["--", *command]
    words = ["-n", str(len(job["ranks"])), "--log-dir", "logs", "--name", name, "--events", "events"]
    words += ["--heartbeat-timeout", "3" if job["disturb"] == "stop" else "20"]
    (folder / "in").write_bytes(given_input(job))
    stdin = folder / "in" if job["input"] is not None else os.devnull
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err, open(stdin, "rb") as given:
        return subprocess.Popen(
            [sys.executable, "-m", "dbrdist_launch", *words, *command], cwd=folder, env=env,
            stdin=given, stdout=out if job["disturb"] != "slow" else subprocess.PIPE,
            stderr=err, preexec_fn=lambda: state_of(job),
        )  # fmt: skip


def disturb(job: dict[str, Any], child: subprocess.Popen[bytes], folder: pathlib.Path, name: str) -> None:
    """What happens around the job."""
    if job["disturb"] == "stacks":
        for _ in range(2):
            words = [sys.executable, "-m", "dbrdist_launch", "stacks", name]
            subprocess.run(words, env=environment("asks"), capture_output=True, timeout=60)
    elif job["disturb"] == "stop":
        time.sleep(0.5 if not job["beats"] else 3.0)  # then the ranks have beaten, and wait
        pids = [child.pid, *linux.descendants(child.pid)]  # of our own launcher alone
        for pid in pids:
            linux.kill(pid, signal.SIGSTOP)
        time.sleep(4.5)  # longer than a heartbeat may be late
        for pid in reversed(pids):
            linux.kill(pid, signal.SIGCONT)
        (folder / "stopped").touch()
    elif job["disturb"] == "slow":
        time.sleep(1.0)
        assert child.stdout is not None
        with open(folder / "out", "wb") as file:
            while data := child.stdout.read(1 << 16):
                file.write(data)
        child.stdout.close()


def faults(job: dict[str, Any], code: int, folder: pathlib.Path, launcher: pathlib.Path) -> list[str]:
    """What is wrong with the end of a job."""
    found = []
    culprit = job["culprit"]
    wanted = 0
    if culprit is not None:
        mine = job["ranks"][culprit]
        wanted = 128 + mine["code"] if mine["end"] == "kill" else mine["code"]
    if code == 0 if culprit is not None and mine["end"] == "early" else code != wanted:
        found.append(f"exit code {code}, expected {wanted or 'another one'}")
    text = (folder / "logs" / "latest" / "status.json").read_text()
    status = json.loads(text)
    if "\\ud" in text:
        found.append("status.json holds half letters")
    told = list(map(json.loads, (folder / "events").read_text().splitlines()))
    ended = [event["rank"] for event in told if event["event"] == "rank_ended"]
    if culprit is None and sorted(ended) != list(range(len(job["ranks"]))):
        found.append(f"events tell of the ends of ranks {ended}")
    blamed = status["failure"] and status["failure"]["rank"]
    if blamed != culprit:
        found.append(f"rank {blamed} is blamed, expected {culprit}")
    shown = (folder / "out").read_bytes()
    for number, mine in enumerate(job["ranks"]):
        data = written(mine)
        log = folder / "logs" / "latest" / "attempt-0" / f"rank-{number}.out"
        kept = log.read_bytes() if log.exists() else b""
        if mine["end"].startswith("wait"):
            if not data.startswith(kept):
                found.append(f"rank {number}: its log holds what it has not written")
            continue
        if kept != data:
            found.append(f"rank {number} wrote {len(data)} bytes, its log holds {len(kept)}")
        found += seen_by(job, number, folder, launcher)
    if job["spawns"] and shown.count(b"zz spawned zz") != 1:
        found.append("what a spawned process wrote is not shown")
    letters = sum(log.read_bytes().count(b"z") for log in (folder / "logs" / "latest" / "attempt-0").glob("*.out"))
    if shown.count(b"z") != letters:
        found.append(f"the screen shows {shown.count(b'z')} of {letters} letters z")
    return found


def seen_by(job: dict[str, Any], number: int, folder: pathlib.Path, launcher: pathlib.Path) -> list[str]:
    """Where the state of a rank is not the one that was given."""
    seen = json.loads((folder / f"seen-{number}").read_text())
    mask = sum(1 << (blocked - 1) for blocked in job["blocked"])
    path = str(launcher) + (":" + job["python_path"] if job["python_path"] else "")
    words = [*(["--quiet"] if job["module"] else []), *job["words"]]
    path += f":{folder}" if job["module"] else ""
    wanted = {"words": words, "kept": "whole", "odd": job["odd"], "unbuffered": job["unbuffered"], "path": path}
    if job["input"] is not None and number == 0:
        wanted["input"] = hashlib.sha256(given_input(job)).hexdigest()
    wrong = {key: value for key, value in wanted.items() if seen[key] != value}
    found = [f"rank {number}: {key} is {seen[key]!r}, expected {value!r}" for key, value in wrong.items()]
    if (
        not (job["filter"] or job["shell"]) and int(seen["blocked"], 16) != mask
    ):  # a shell that stands between sets its own mask
        found.append(f"rank {number}: blocked signals {seen['blocked']}, expected {mask:x}")
    ignored = sum(1 << (number - 1) for number in job["ignored"])
    hydra = 1 << (signal.SIGTTIN - 1)  # which mpiexec ignores, and hands on
    python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    looks = [("a rank", seen["ignored"], python | hydra)]
    if job["shell"]:
        looks.append(("a shell", (folder / f"ignored-{number}").read_text().split()[1], hydra))
    for who, found_there, own in looks:
        if int(found_there, 16) | own != ignored | own:
            found.append(f"rank {number}: {who} sees ignored signals {found_there}, expected {ignored:x}")
    if job["files"] and seen["files"] != job["files"]:
        found.append(f"rank {number}: {seen['files']} files may be open, expected {job['files']}")
    return found


def run(seed: str, launcher: pathlib.Path = ROOT / "launch", seconds: float = 90.0) -> list[str]:
    """Run one job; what is wrong with it."""
    job, mark = make(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        child = start(job, folder, f"fuzz-{mark[:8]}", mark, launcher)
        try:
            disturb(job, child, folder, f"fuzz-{mark[:8]}")
            code = child.wait(seconds)
            assert_nothing_left(mark)
            found = faults(job, code, folder, launcher)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            found = [f"it hung for {seconds:g} s"]
        except (AssertionError, OSError, ValueError) as error:
            found = [repr(error)]
        if found:
            found.append((folder / "err").read_text(errors="replace")[-2000:])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", type=int)
    parser.add_argument("--plant", choices=PLANTS, help="break a copy of the launcher, to see that it is found")
    parser.add_argument("--stop", action="store_true", help="stop at the first fault")
    given = parser.parse_args(arguments)
    numbers = [given.only] if given.only is not None else range(given.jobs)
    bad, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        launcher = broken(PLANTS[given.plant], pathlib.Path(place)) if given.plant else ROOT / "launch"
        for number in numbers:
            found = run(f"{given.seed}/{number}", launcher)
            if found:
                bad += 1
                print(f"job {number}: {json.dumps(make(f'{given.seed}/{number}'))}", *found, sep="\n  ", flush=True)
                if given.stop:
                    break
    print(f"{len(numbers)} jobs, {bad} faults, seed {given.seed}, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
