"""Random jobs for runs of `dbrdist-train`: what they save, resume, record, print and draw, against independent oracles.

    python -m tests.fuzz.runs --jobs 1000 --seed 0            # exit code 1 and the seed of each job that failed
    python -m tests.fuzz.runs --jobs 200 --plant nan_is_best   # breaks the code first: the fuzzer must find it

The job with number k of seed S depends on (S, k) alone: `--only k` repeats it.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.cli.configuration import document, load
from dbrdist.cli.inspection import chart, curves, page, records
from dbrdist.core.files.serializer import NpzDeserializer, saved_state
from dbrdist.core.model.reporter import DictSummary
from dbrdist.datasets.image import images
from dbrdist.datasets.image import transforms as T
from dbrdist.training import goals, runs, triggers
from tests.cli.configuration import test_schema as schema_cases
from tests.fuzz import runs_of_commands
from tests.fuzz.runs_of_commands import dbrdist_train, new_folder

Draw = random.Random
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, 5e-324]


def number(draw: Draw) -> float:
    return draw.choice(SPECIAL) if draw.random() < 0.3 else draw.gauss(0, 1) * 10 ** draw.randint(-3, 3)


# ---- texts and configurations

PARTS = [chr(c) for c in range(32, 127)] + [
    *("\n", "\t", "\r", "\0", "\x07", "\x7f", "\x85", "\xa0", "\u2028", "\u2029", "\ufeff", "\udce9", "é", "漢", "😀"),
    *("<<", "~", "null", "1e3", "1_0", "0x1", "0o7", ".inf", ".nan", "true", "no", "---", "...", "- ", ": ", " #"),
    *("%YAML", "&a", "*a", "!!str", "=", "2020-01-01", "12:30", "\n\n", "\n "),
]


def text(draw: Draw) -> str:
    return "".join(draw.choice(PARTS) for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 20, 200])))


def plain(draw: Draw, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 3 or kind < 0.5:
        return text(draw)
    if kind < 0.6:
        return draw.choice([None, True, False, 0, -7, 10**20, 1e-5, 1e22, 2.5, 5e-324])
    if kind < 0.8:
        return {text(draw): plain(draw, depth + 1) for _ in range(draw.randrange(4))}
    return [plain(draw, depth + 1) for _ in range(draw.randrange(4))]


def texts_survive(draw: Draw) -> None:
    args = {text(draw): plain(draw) for _ in range(3)}
    folder = text(draw).replace("\0", "").replace("\udce9", "é") or "out"
    data = {"model": {"name": "a.b:c", "args": args}, "data": "digits", "batch": 1, "epochs": 1, "out": folder}
    config, _ = load.check(document.write(data).encode(), "f")
    again, _ = load.check(load.dump(config).encode(), "f")
    assert again == config and again.model.args == args, (args, again.model.args)


# ---- triggers


class Place:
    """As much of a trainer as triggers read."""

    def __init__(self) -> None:
        self.updater = self
        self.observation: dict[str, float] = {}
        self.iteration, self.epoch_detail, self.previous_epoch_detail = 0, 0.0, 0.0
        self.elapsed_time = 0.0

    def step(self, **observation: float) -> Place:
        self.iteration += 1
        self.previous_epoch_detail, self.epoch_detail = self.epoch_detail, self.iteration / 4
        self.observation = observation
        return self


def best_values(draw: Draw) -> None:
    """Over several starts whose key or direction may change, against a loop that begins anew where one does."""
    place, best, before, trigger = Place(), None, None, None
    for _ in range(draw.randint(1, 4)):
        key, highest = draw.choice("ab"), draw.random() < 0.5
        kind = triggers.MaxValueTrigger if highest else triggers.MinValueTrigger
        made = kind(key, (1, "iteration"))
        if trigger is not None:
            NpzDeserializer(saved_state(trigger)).load(made)
        if before != (key, highest):
            best = None
        before, trigger = (key, highest), made
        for _ in range(draw.randrange(6)):
            values = {"a": number(draw), "b": number(draw)}
            value = values[key]
            wins = not math.isnan(value) and (best is None or (value > best if highest else value < best))
            best = value if wins else best
            assert trigger(place.step(**values)) == wins, (before, value, best)


def goals_over_starts(draw: Draw) -> None:
    """A goal over several starts whose key or direction may change: its best value and patience are of its own."""
    place, goal, before, best, count = Place(), None, None, None, 0
    for _ in range(draw.randint(1, 4)):
        key, mode = draw.choice("ab"), draw.choice(["min", "max"])
        made = goals.GoalTrigger(1e9, None, key, patience=10**6, mode=mode)
        if goal is not None:
            NpzDeserializer(saved_state(goal)).load(made)
        if before != (key, mode):
            best, count = None, 0
        before, goal = (key, mode), made
        for _ in range(draw.randrange(6)):
            values = {"a": number(draw), "b": number(draw)}
            value = values[key]
            wins = not math.isnan(value) and (best is None or (value > best if mode == "max" else value < best))
            best, count = (value, 0) if wins else (best, count + 1)
            goal(place.step(**values))
            assert (goal.best, goal.count) == (best, count), (before, value, goal.best, best)


def schemas(draw: Draw) -> None:
    """A configuration with one entry of some kind: the schema takes it where the command does."""
    name, cls, data, place = draw.choice(list(schema_cases.components()))
    key = draw.choice([*cls.model_fields, "nothing"])
    value = draw.choice([*schema_cases.VALUES, 255, 256, 65536, [[0, 8], [3, 4]], [1, 2, 3], 1e-9])
    assert not list(schema_cases.differences(data, [*place, key], [value])), (name, key, value)


def intervals(draw: Draw) -> None:
    """Joined intervals over several starts: each fires where a whole period is passed, also after a change of unit."""
    place, trigger = Place(), None
    for _ in range(draw.randint(1, 4)):
        periods = [(draw.randint(1, 5), draw.choice(["epoch", "iteration"])) for _ in range(draw.randint(1, 3))]
        made = triggers.AnyTrigger(*periods)
        if trigger is not None:
            NpzDeserializer(saved_state(trigger)).load(made)
        trigger = made
        for _ in range(draw.randrange(1, 12)):
            before = {"epoch": place.epoch_detail, "iteration": place.iteration}
            place.step()
            now = {"epoch": place.epoch_detail, "iteration": place.iteration}
            expected = any(before[unit] // period != now[unit] // period for period, unit in periods)
            assert trigger(place) == expected, (periods, before, now)


def means(draw: Draw) -> None:
    values = [number(draw) for _ in range(draw.choice([1, 2, 5, 64, 65, 200]))]
    summary = DictSummary()
    for value in values:
        summary.add({"a\nb": value})
    again = DictSummary()
    NpzDeserializer(saved_state(summary)).load(again)
    with np.errstate(all="ignore"):
        expected = float(np.mean(np.array(values, np.longdouble)))
    found = again.compute_mean()["a\nb"]
    scale = max([abs(v) for v in values if math.isfinite(v)], default=1.0)
    same = (math.isnan(found) and math.isnan(expected)) or found == expected
    assert same or abs(found - expected) <= 1e-12 * scale, (found, expected)


# ---- reports


def reports(draw: Draw) -> None:
    """Every name within the picture, as many colours as runs, the extremes of each curve among its points."""
    with tempfile.TemporaryDirectory() as folder:
        paths, names = [], []
        for k in range(draw.choice([1, 1, 2, 6, 12, 15])):
            name = f"{k}-" + re.sub(r"[\0/\udce9]", "_", text(draw))[:60]
            names.append(name)
            paths.append(os.path.join(folder, name))
            os.makedirs(paths[-1])
            with open(os.path.join(paths[-1], "log.jsonl"), "w", encoding="utf-8") as file:
                for i in range(draw.choice([1, 3, 50, 2500])):
                    values = {key: number(draw) for key in ("main/loss", "validation/main/loss", "main/own")}
                    finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
                    file.write(json.dumps({**finite, "epoch_detail": i / 10}) + "\n")
        found = [records.read(path) for path in paths]
        written = page.render(found)
        for run in found:
            for key in ("main/loss", "main/own"):
                logged = [e[key] for e in run.log if e[key] is not None]
                drawn = [y for _, y in curves.points(run.log, key)]
                assert not logged or (min(drawn), max(drawn)) == (min(logged), max(logged))
                assert len(drawn) <= 1100
        for x in re.findall(r'<text x="([-\d.]+)"', written):
            assert 0 <= float(x) <= chart.WIDTH, x
        assert "nan" not in re.sub(r"<title>.*?</title>|>[^<]*<", "", written)
        drawable = [v for run in found for e in run.log if (v := e.get("main/own")) is not None]
        assert ">own<" in written or not drawable
        if len(found) > 1:
            assert len({chart.colour(k) for k in range(len(found))}) == len(found)


# ---- images


def sizes(draw: Draw) -> None:
    """A transform either keeps below the limit of pixels or says that it would not, and takes no memory for it."""
    height, width = draw.choice([(1, draw.randint(1, 60_000)), (draw.randint(1, 60_000), 1), (40, 30)])
    image = np.zeros((height, width, 3), np.uint8)
    size = draw.choice([1, 7, 256, 1024])
    made = draw.choice([T.Resize(size), T.CenterResizedCrop(size), T.RandomResizedCrop(size)])
    try:
        result = made(image, np.random.default_rng(draw.randrange(99)))
    except images.ImageDecodeError as error:
        short = min(height, width)
        assert isinstance(made, T.Resize) and height * width * (size / short) ** 2 > 0.9e8, error
    else:
        assert result.shape[0] * result.shape[1] <= images.MAX_PIXELS


# ---- whole runs

CHANGES: dict[str, Callable[[Draw], Any]] = {
    "optimizer.lr": lambda d: round(d.uniform(0.01, 0.3), 3),
    "optimizer.momentum": lambda d: round(d.uniform(0, 0.95), 2),
    "optimizer.hooks": lambda d: d.choice(["[]", "[{name: weight_decay, rate: 1e-4}]", "[{name: lasso, rate: 1e-5}]"]),
    "optimizer.schedule": lambda d: d.choice(["constant", "cosine"]),
    "schedules": lambda d: d.choice(["[]", "[{of: optimizer.momentum, schedule: {name: polynomial, end: 0.1}}]"]),
    "ema": lambda d: d.choice(["null", "0.9"]),
    "batch": lambda d: d.choice([50, 100, 144]),
    "accumulate": lambda d: d.choice([1, 2]),
    "loss.label_smoothing": lambda d: d.choice([0, 0.1]),
    "snapshot.best": lambda d: d.choice(["null", "validation/main/loss", "validation/main/accuracy", "main/loss"]),
    "snapshot.mode": lambda d: d.choice(["auto", "min", "max"]),
    "snapshot.every": lambda d: d.choice(["1 epoch", "4 iterations", "1 epoch or 30 minutes"]),
    "snapshot.background": lambda d: d.choice(["true", "false"]),
    "log.every": lambda d: d.choice(["1 epoch", "3 iterations"]),
}


def strict(content: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(content, parse_constant=refuse)


def resumed_runs(draw: Draw) -> None:
    """Starts with other values each: what is used, recorded and saved as the best are of one mind."""
    with new_folder():
        _resumed_runs(draw)


def _resumed_runs(draw: Draw) -> None:
    content = "model: {name: mlp, units: [4]}\ndata: digits\nbatch: 100\noptimizer: {lr: 0.1}\nepochs: 1\nout: run\n"
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(content)
    since, last_key, used = 0, None, {}
    for start in range(draw.randint(1, 3)):
        often = ["schedules"] if draw.random() < 0.5 else []  # a number whose schedule comes or goes
        for key in dict.fromkeys([*often, *draw.sample(list(CHANGES), draw.randint(0, 4))]):
            used[key] = CHANGES[key](draw)
        words = [f"{key}={value}" for key, value in used.items()]
        code, out = dbrdist_train("run.yaml", *words, f"epochs={start + 1}", *(["--resume"] if start else []))
        assert code == 0, (words, out)
        asked, _ = load.load("run.yaml", [*words, f"epochs={start + 1}"])
        with open("run/config.yaml", encoding="utf-8") as file:
            recorded, _ = load.check(file.read().encode(), "f")
        assert recorded == asked, words
        with open("run/log.jsonl", encoding="utf-8") as file:
            log = [strict(line) for line in file]
        for name in ("summary.json", "model.json"):
            with open(f"run/{name}", encoding="utf-8") as file:
                strict(file.read())
        newest = np.load(runs.find_snapshot("run"))
        steps = int(newest["updater/iteration"])
        assert log[-1]["iteration"] == steps
        if asked.schedules == ():
            assert float(newest["updater/optimizer:main/hyperparam/momentum"]) == asked.optimizer.momentum, words
        highest = asked.snapshot.mode == "max" or (
            asked.snapshot.mode == "auto" and "accuracy" in (asked.snapshot.best or "")
        )
        measured_by = asked.loss if (asked.snapshot.best or "").endswith("/loss") else None
        named = (asked.snapshot.best, highest, measured_by)
        if named != last_key:
            since, last_key = steps, named
            seen: list[tuple[float, int]] = []
        if asked.snapshot.best is not None and asked.snapshot.best.startswith("validation/"):
            _check_best(log, named, steps, since, seen)


def _check_best(log: Any, named: Any, steps: int, since: int, seen: list[tuple[float, int]]) -> None:
    """Evaluations come once per start here: the end of its epoch."""
    key, highest, _ = named
    (value,) = (entry[key] for entry in log if entry["iteration"] == steps)
    seen.append((value, steps))
    best = (max if highest else min)(seen, key=lambda pair: pair[0])
    found = int(np.load("run/snapshot_best")["updater/iteration"])
    assert found == best[1], (named, seen, found)


JOBS: dict[Callable[[Draw], None], int] = {
    texts_survive: 6,
    best_values: 5,
    goals_over_starts: 4,
    schemas: 4,
    intervals: 4,
    means: 4,
    reports: 2,
    sizes: 2,
    resumed_runs: 2,
    **runs_of_commands.JOBS,
}

# ---- planted faults


def plant(name: str) -> None:
    """Break the code in a known way: at least one for each class of faults that was found once."""
    runs_of_commands.planted[0] = name

    def always(serializer: Any, subject: str) -> bool:
        return True

    if name == "nan_is_best":
        triggers.math = type("Math", (), {**vars(math), "isnan": staticmethod(lambda x: False)})  # type: ignore[assignment]
    elif name == "state_without_names":
        triggers.is_about = always  # type: ignore[assignment]
    elif name == "goals_without_direction":
        goals.is_about = always  # type: ignore[assignment]
    elif name == "schema_of_any_text":
        texts = [one for one in schema_cases.SCHEMA["$defs"].values() if "properties" in one]
        for one in texts:
            one.pop("additionalProperties", None)
            one.pop("required", None)
    elif name == "no_recorded_changes":
        from dbrdist.cli.running import resume

        resume.apply = lambda found, optimizer, config: None
    elif name == "json_with_nan":
        from dbrdist.core.files import strict_json

        strict_json.dumps = lambda data, indent=None: json.dumps(
            {**data, "x": math.nan} if isinstance(data, dict) else data
        )
    elif name == "yaml_1_1":
        import yaml

        document.write = lambda data, **options: yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    elif name == "curves_of_every_kth_point":
        curves.points = lambda log, key, *between: [  # type: ignore[assignment]
            (e["epoch_detail"], e[key]) for e in log if records.number(e.get(key)) is not None
        ][:: max(1, len(log) // 500)]
    elif name == "wide_legend":
        chart._width = lambda words: -40.0 * len(words)  # type: ignore[assignment]
    elif name == "no_limit_of_pixels":
        T.check_pixels = images.check_pixels = lambda *arguments: None  # type: ignore[assignment]
        images._resize_cv2 = lambda image, height, width, *rest: np.broadcast_to(np.uint8(0), (height, width, 3))
    elif name == "infinite_means_are_nan":
        from dbrdist.core.model import reporter

        reporter._mean_beyond = lambda mean, x, share: math.nan  # type: ignore[assignment]
    elif name == "momentum_of_a_gone_schedule":
        from dbrdist.cli.running import resume

        resume._no_longer_scheduled = lambda found: set()  # type: ignore[assignment]
    elif name == "eight_colours":
        chart.colour = curves.colour = lambda number: chart.COLOURS[number % 8]
    elif name == "no_charts_of_own_metrics":
        curves.own_charts = lambda runs: []  # type: ignore[assignment]
    elif name == "schema_without_short_forms":
        for one in [*schema_cases.SCHEMA["$defs"].values(), *schema_cases.SCHEMA["properties"].values()]:
            if any(part.get("type") in ("number", "integer", "string") for part in one.get("anyOf", ())):
                one["anyOf"] = [
                    part for part in one["anyOf"] if part.get("type") not in ("number", "integer", "string")
                ]
    elif name in runs_of_commands.PLANTS:
        runs_of_commands.PLANTS[name]()
    else:
        raise SystemExit(f"expected a fault of {', '.join(PLANTS)}, got {name!r}")


PLANTS = (
    *("nan_is_best", "state_without_names", "yaml_1_1", "curves_of_every_kth_point", "wide_legend"),
    *("goals_without_direction", "schema_of_any_text", "no_recorded_changes", "json_with_nan"),
    *("no_limit_of_pixels", "infinite_means_are_nan", "momentum_of_a_gone_schedule", "eight_colours"),
    *("no_charts_of_own_metrics", "schema_without_short_forms", *runs_of_commands.PLANTS),
)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one job")
    names = {job.__name__: job for job in JOBS}
    parser.add_argument("--kinds", nargs="+", choices=[*names], default=[*names], help="only these kinds of jobs")
    parser.add_argument("--plant", choices=PLANTS, help="break the code first")
    parser.add_argument("--stop", action="store_true", help="stop at the first fault")
    options = parser.parse_args(words)
    # A shell starts what runs in the background with interrupts ignored, and programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.plant:
        plant(options.plant)
    kinds = {names[name]: JOBS[names[name]] for name in options.kinds}
    began, counts, failed = time.monotonic(), collections.Counter[str](), []
    for k in range(options.jobs) if options.only is None else [options.only]:
        draw = random.Random(f"{options.seed} {k}")
        job = draw.choices(list(kinds), list(kinds.values()))[0]
        counts[job.__name__] += 1
        try:
            job(draw)
        except Exception as error:
            failed.append(k)
            print(
                f"job {k} of seed {options.seed}: {job.__name__}: {type(error).__name__}: {str(error)[:500]}",
                flush=True,
            )
            if options.only is not None:
                traceback.print_exc()
            if options.stop:
                break
    seconds = time.monotonic() - began
    print(f"{sum(counts.values())} jobs in {seconds:.0f} s, {len(failed)} failed: {dict(counts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
