"""The twin of the large-batch runs: CIFAR-10 and ResNet-20 with ImageNet's number of steps per epoch (TWIN.md).

    python examples/imagenet/twin/twin.py CIFAR10           # everything, in the order of the plan
    python examples/imagenet/twin/twin.py CIFAR10 --list    # what is done, what is not
    python examples/imagenet/twin/twin.py CIFAR10 --only 'akiba-*' --ranks 2
    python examples/imagenet/twin/twin.py CIFAR10 --hashes 100 --per-worker 4

CIFAR10 holds train/CLASS/ and test/CLASS/. The same command continues after an interruption of any kind: runs that are
done are left alone, the one that was cut off resumes from its newest snapshot. Ctrl-C, SIGTERM and SIGUSR1 stop after
the step in hand. The results of each run go to results.json beside this program, a file to be committed: the runs in it
are not trained again, on any machine. With KEY=VALUE they go to OUT/results.json.
"""

import argparse
import ctypes
import fcntl
import fnmatch
import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dbrdist.cli.configuration import load
from dbrdist.training.runs import find_snapshot

HERE = Path(__file__).resolve().parent
STOPPED = 75  # of dbrdist-train: saved, to be started again with --resume
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # quantiles of Student's distribution for so many differences


class Planned(NamedTuple):
    """A run: its name, its configuration here, and what it changes."""

    name: str
    config: str
    words: tuple[str, ...]


# ---- the plan --------------------------------------------------------------------------------------------------------


def shortened(config: str, epochs: int) -> tuple[str, ...]:
    """The schedules of 90 epochs in fewer: every epoch in them becomes as much shorter."""
    scale = epochs / 90
    words = [f"epochs={epochs}"]
    if config == "akiba":
        words.append(f"optimizer.schedule.milestones={[round(e * scale, 4) for e in (0, 40, 70, 85)]}")
        elu = f"{{name: elu, center: {10 * scale:.4f}, period: {5 * scale:.4f}}}"
        words.append(f"schedules=[{{of: optimizer.a_sgd, schedule: {elu}}}]")
    elif config in ("momentum", "goyal"):
        words.append(f"optimizer.schedule.milestones={[round(e * scale, 4) for e in (30, 60, 80)]}")
        words.append(f"optimizer.schedule.warmup_epochs={5 * scale:.4f}")
    return tuple(words)


ABLATIONS = {
    "no-rmsprop": ("schedules=[]",),  # the share of SGD is 1 all along
    "no-slow-start": ("optimizer.schedule.factors=[1, 0.1, 0.01, 0.001]",),
    "moving-averages": ("batch_norm.statistics=running",),
    "float32": ("gradient_dtype=null",),
}


def plan() -> list[Planned]:
    """All runs, the most telling first; in bfloat16 but for those that compare it with float32."""
    runs = [
        Planned(f"{config}-30-seed{seed}", config, (*shortened(config, 30), f"seed={seed}"))
        for seed in range(3)
        for config in ("akiba", "momentum")
    ]
    runs.append(Planned("akiba-15", "akiba", shortened("akiba", 15)))
    runs += [
        Planned(f"akiba-15-{name}", "akiba", (*shortened("akiba", 15), *words)) for name, words in ABLATIONS.items()
    ]
    runs.append(Planned("akiba-90", "akiba", ()))
    small = (
        "batch={virtual_workers: 1, per_worker: 32}",
        "optimizer.lr=0.0125",
        "optimizer.schedule.warmup_start=0.0125",
    )
    for seed in range(3):
        words = (*shortened("goyal", 15), f"seed={seed}")
        runs.append(Planned(f"goyal-15-seed{seed}", "goyal", words))
        runs.append(Planned(f"goyal-small-15-seed{seed}", "goyal", (*words, *small)))
    for workers in (40, 80, 160, 320):
        words = (
            "epochs=15",
            "optimizer.schedule.warmup_epochs=2.5",
            f"batch={{virtual_workers: {workers}, per_worker: 32}}",
            f"optimizer.lr={5 * (workers / 40) ** 0.5:.3f}",
        )
        runs.append(Planned(f"lars-15-batch{32 * workers}", "lars", words))
    runs = [run._replace(words=(*run.words, "dtype=mixedbf16")) for run in runs]
    for seed in range(3):
        words = (*shortened("akiba", 10), f"seed={seed}")
        runs.append(Planned(f"akiba-10-float32-seed{seed}", "akiba", words))
        runs.append(Planned(f"akiba-10-bfloat16-seed{seed}", "akiba", (*words, "dtype=mixedbf16")))
    return runs


# ---- one run ---------------------------------------------------------------------------------------------------------


class Twin:
    """Starts runs of dbrdist-train, one after the other."""

    def __init__(self, data: str, out: Path, more: tuple[str, ...], results: Path | None = None) -> None:
        self.data, self.out, self.more = data, out, more
        self.results = results or (out / "results.json" if more else HERE / "results.json")
        self.kept = kept_in(self.results)
        self._job: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        """Pass a request on as one that saves."""
        self._is_stopping = True
        if self._job is not None:
            self._job.send_signal(signal.SIGUSR1)

    def status(self, run: Planned) -> str:
        """`finished` where its results are kept, or what its folder says: `new`, or whatever came of it."""
        if self.is_kept(run):
            return "finished"
        path = self.out / run.name / "summary.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else "new"

    def is_kept(self, run: Planned) -> bool:
        """Are there results of this run as the plan has it now?"""
        return run.name in self.kept and self.kept[run.name]["settings"] == self.settings(run)

    def settings(self, run: Planned) -> str:
        """A hash of what the run's configuration sets, but for the folders."""
        config, _ = load.load(HERE / f"{run.config}.yaml", (*run.words, *self.more))
        data = config.model_dump(
            mode="json", exclude_unset=True, exclude={"data": {"root"}, "out": True, "extends": True}
        )
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def train(self, run: Planned, ranks: int) -> None:
        """Begin or continue a run until it is finished. SystemExit where it was stopped, or cannot be finished."""
        words = ["dbrdist-train", HERE / f"{run.config}.yaml", f"data.root={self.data}", f"out={self.out / run.name}"]
        words = [*map(str, words), *run.words, *self.more, "--resume"]
        # the launcher starts a job again that fails by chance, and leaves nothing behind if it is killed itself
        launcher = ["dbrdist-launch", "--max-restarts", "3", "--no-view", "-n", str(min(ranks, workers_of(run))), "--"]
        if self.status(run) != "finished":
            print(f"{run.name}: {' '.join(words)}", flush=True)
            # a session of its own: Ctrl-C reaches this program alone, which asks the ranks to save
            self._job = subprocess.Popen([*launcher, *words], start_new_session=True, preexec_fn=save_without_parent)
            if self._is_stopping:  # the request came while the job was being started
                self._job.send_signal(signal.SIGUSR1)
            code = self._job.wait()
            if code == STOPPED or self._is_stopping:
                sys.exit(STOPPED)
            if code:
                sys.exit(f"twin: {run.name} ended with code {code}; see above, and start this again")

    def newest(self, run: Planned) -> Path:
        """The run's newest snapshot."""
        return Path(find_snapshot(str(self.out / run.name)))


def save_without_parent() -> None:
    """In a new process: have it save and end if this program is killed, so that no job trains beside the next start."""
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG of prctl(2)


def workers_of(run: Planned) -> int:
    """The largest number of ranks that a run can use."""
    words = next((word for word in run.words if word.startswith("batch=")), None)
    if words is not None:
        return int(words.split("virtual_workers: ")[1].split(",")[0])
    return 10 if run.config == "goyal" else 40


def hash_of(snapshot: Path) -> str:
    """SHA-256 of the network's parameters and statistics and of the optimizer's state, by name."""
    total = hashlib.sha256()
    with np.load(snapshot) as saved:
        for name in sorted(saved.files):
            if name.startswith(("updater/model:", "updater/optimizer:")):
                total.update(name.encode() + saved[name].tobytes())
    return total.hexdigest()


# ---- what came of them -----------------------------------------------------------------------------------------------


def outcome(twin: Twin, run: Planned) -> dict[str, Any]:
    """What is kept of a run that is finished: accuracy and loss by epoch, time, hash, and what it was made with."""
    if twin.is_kept(run):  # a folder here may hold a part of a run that another machine finished
        return twin.kept[run.name]
    folder = twin.out / run.name
    summary = json.loads((folder / "summary.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    ends = [entry for entry in log if "validation/main/accuracy" in entry]
    curve = [round(entry["validation/main/accuracy"], 6) for entry in ends]
    return {
        "accuracy": statistics.median(curve[-5:]),  # as Goyal et al. report it
        "curve": curve,
        "loss": [round(entry["main/loss"], 5) for entry in ends if "main/loss" in entry],
        "steps": summary["iterations"],
        "seconds": round(summary["seconds_over_all_starts"], 1),
        "ranks": summary["num_ranks"],
        "hash": hash_of(twin.newest(run)),
        "settings": twin.settings(run),
        "ended": summary.get("ended"),
        "version": summary.get("version"),
        "commit": summary.get("commit"),
        "versions": summary.get("versions"),
        "processor": processor(),
    }


def processor() -> str:
    """The name of this machine's processor, and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def difference(found: dict[str, dict[str, Any]], first: str, second: str) -> str:
    """The mean difference of two runs over the seeds that both have, with its 95 % interval."""
    pairs = [(found[first.format(s)], found[second.format(s)]) for s in range(3)
             if first.format(s) in found and second.format(s) in found]  # fmt: skip
    values = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
    if len(values) < 2:
        return f"{len(values)} of 3 seeds: no interval yet"
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):+.2f} % +- {half:.2f} ({len(values)} seeds)"


def report(twin: Twin, runs: list[Planned]) -> None:
    """Add all runs of the plan that are finished to the file of results, and print a line for each of these runs.

    What others have added meanwhile stays, and so does what was made with other settings until that run is done again.
    """
    twin.results.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(twin.results.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # several may add to one file
        twin.kept = kept_in(twin.results)
        found, comparisons = finished(twin)
        if any(twin.kept.get(name) != line for name, line in found.items()):
            twin.kept |= found
            write(twin.results, twin.kept, comparisons)
    finally:
        os.close(folder)
    for run in runs:
        line = found.get(run.name)
        if line is None:
            print(f"{run.name:28} {twin.status(run)}")
        else:
            print(f"{run.name:28} {100 * line['accuracy']:6.2f} % {line['seconds']:9,.0f} s  {line['hash']:.16}")
    for name, words in comparisons.items():
        print(f"{name}: {words}")


def finished(twin: Twin) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The results of the plan's finished runs, and how they compare."""
    found = {run.name: outcome(twin, run) for run in plan() if twin.status(run) == "finished"}
    comparisons = {
        "akiba - momentum, 30 epochs": difference(found, "akiba-30-seed{}", "momentum-30-seed{}"),
        "goyal - small batches, 15 epochs": difference(found, "goyal-15-seed{}", "goyal-small-15-seed{}"),
        "bfloat16 - float32, 10 epochs": difference(found, "akiba-10-bfloat16-seed{}", "akiba-10-float32-seed{}"),
    }
    return found, comparisons


def kept_in(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file. SystemExit where it is damaged, as by a merge that was left half-done."""
    if not path.exists():
        return {}
    try:
        runs = json.loads(path.read_text())["runs"]
        if all("settings" in line for line in runs.values()):
            return dict(runs)
        words = "a run without settings"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
    sys.exit(f"twin: {path} is no file of results ({words}): mend it, or name another one with --results")


def write(path: Path, found: dict[str, dict[str, Any]], comparisons: dict[str, str]) -> None:
    """A line of JSON for each run, so that two machines' files are merged line by line; whole, or not at all."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items())
    path.with_suffix(".part").write_text(
        f'{{"runs": {{\n{lines}\n}}, "comparisons": {json.dumps(comparisons, indent=1)}}}\n'
    )
    os.replace(path.with_suffix(".part"), path)


def compare_hashes(twin: Twin, steps: int, per_worker: int) -> None:
    """The first steps on 1, 2 and 4 ranks: all must end with the same bits."""
    hashes = {}
    for ranks in (1, 2, 4):
        words = (f"batch={{virtual_workers: 40, per_worker: {per_worker}}}", f"iterations={steps}", "data.test=null")
        run = Planned(f"hash-{steps}x{40 * per_worker}-ranks{ranks}", "akiba", words)
        twin.train(run, ranks)
        hashes[ranks] = hash_of(twin.newest(run))
        print(f"{ranks} ranks, {steps} steps of {40 * per_worker}: {hashes[ranks]}", flush=True)
    if len(set(hashes.values())) > 1:
        sys.exit("twin: the hashes differ")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="CIFAR10", help="the folder that holds train/CLASS/ and test/CLASS/")
    parser.add_argument("more", nargs="*", metavar="KEY=VALUE", help="what changes in every run")
    parser.add_argument("--out", type=Path, default=Path("result/twin"))
    parser.add_argument("--results", type=Path, help="default: results.json here, with KEY=VALUE in OUT")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'akiba-30-*'")
    parser.add_argument("--list", action="store_true", help="train nothing")
    parser.add_argument("--hashes", type=int, metavar="STEPS", help="compare 1, 2 and 4 ranks after so many steps")
    parser.add_argument("--per-worker", type=int, default=32, help="images of each of 40 workers, for --hashes")
    args = parser.parse_intermixed_args(words)
    if not fnmatch.filter([run.name for run in plan()], args.only):
        parser.error(f"no run is named {args.only!r}; see --list")
    return args


def main() -> None:
    args = arguments()
    twin = Twin(args.data, args.out, tuple(args.more), args.results)
    runs = [run for run in plan() if fnmatch.fnmatch(run.name, args.only)]
    if args.hashes:
        compare_hashes(twin, args.hashes, args.per_worker)
        return
    for run in [] if args.list else runs:
        twin.train(run, args.ranks)
        report(twin, runs)
    report(twin, runs)


if __name__ == "__main__":
    main()
