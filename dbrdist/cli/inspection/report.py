"""A report on runs: one page of HTML that needs no other file, and the curves as PNG where matplotlib is installed."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dbrdist.cli.inspection.chart import Key, Series, chart, colour
from dbrdist.cli.output.folder import CONFIG, LOG, REPORT, SUMMARY, read_json, state_of
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import CheckpointError
from dbrdist.training import plotting
from dbrdist.training.extensions.log_report import read_log

_MAX_IN_TITLE = 3  # runs; the names of more stand below the title, each on its line
_MAX_POINTS = 1000  # of a line: more than the pixels of a chart

# title, file name, keys of the log with what each is called in a chart of one run
CHARTS = (
    ("Loss", "loss", (("main/loss", "training"), ("validation/main/loss", "test"))),
    ("Accuracy", "accuracy", (("main/accuracy", "training"), ("validation/main/accuracy", "test"))),
    ("Learning rate", "learning_rate", (("lr", ""),)),
    ("Examples per second", "throughput", (("examples_per_second", ""),)),
    ("Share of the time spent waiting for data", "data_wait", (("data_wait_fraction", ""),)),
    ("Share of the time spent communicating", "communication", (("communication_fraction", ""),)),
)
_FACTS = (
    ("status", "status"),
    ("reason", "reason"),
    ("epochs", "epochs"),
    ("iterations", "steps"),
    ("began", "began"),
    ("ended", "ended"),
    ("seconds_over_all_starts", "seconds of training"),
    ("num_parameters", "parameters"),
    ("num_ranks", "ranks"),
    ("hosts", "ranks per host"),
    ("communicator", "communicator"),
    ("num_skipped_examples", "training examples left out"),
    ("num_skipped_test_examples", "test examples left out"),
    ("seed", "seed"),
    ("version", "dbrdist"),
    ("versions", "versions"),
    ("commit", "commit"),
    ("command", "command"),
    ("directory", "directory"),
)
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--soft:#5c5c5c;--line:#dcdcdc;--page:#fff;--good:#1d7a3a;--bad:#b3261e}
@media(prefers-color-scheme:dark){
:root{--ink:#e9e9e9;--soft:#a6a6a6;--line:#3a3a3a;--page:#161616;--good:#67c587;--bad:#f2807a}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;
color:var(--ink);background:var(--page)}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:1.2rem;margin-top:1.2rem}
svg{width:100%;height:auto;border:1px solid var(--line);border-radius:6px}
svg text{fill:var(--ink);font-size:12px}svg .title{font-weight:600;font-size:13px}svg .tick{fill:var(--soft)}
svg .grid{stroke:var(--line);fill:none}svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem 1.2rem .15rem 0;vertical-align:top}
th{font-weight:600;white-space:nowrap}td{overflow-wrap:anywhere}.scroll{overflow-x:auto}
pre{background:color-mix(in srgb,var(--ink) 6%,var(--page));padding:.8rem;border-radius:6px;
overflow-x:auto;font-size:13px}
.finished{color:var(--good)}.failed{color:var(--bad)}
"""


class RunRecord(NamedTuple):
    """What a run left in its folder."""

    path: str
    name: str
    summary: dict[str, Any]
    log: list[dict[str, Any]]
    config: str


def read(path: str) -> RunRecord:
    """The record of the run in a folder. Raises CheckpointError where there is none."""
    summary, log = read_json(os.path.join(path, SUMMARY)), read_log(os.path.join(path, LOG))
    config = ""
    if os.path.exists(os.path.join(path, CONFIG)):
        with open(os.path.join(path, CONFIG), encoding="utf-8", errors="replace", opener=regular) as file:
            config = file.read()
    if not summary and not log:
        raise CheckpointError(f"{path}: expected the folder of a run, with {SUMMARY} and {LOG} in it")
    summary = {**summary, "status": state_of(path, summary)}
    return RunRecord(path, os.path.basename(os.path.abspath(path)), summary, log, config)


def write(paths: Sequence[str], pictures: bool = False) -> list[str]:
    """Write the report on one run into its folder, or on several side by side into the first one's; the files' names.

    `pictures` writes the curves of one run as PNG too, where matplotlib is installed.
    """
    runs = _distinct([read(path) for path in paths])
    folder = os.path.join(runs[0].path, REPORT)
    os.makedirs(folder, exist_ok=True)
    page = os.path.join(folder, "index.html" if len(runs) == 1 else "compare.html")
    write_atomically(page, lambda file: file.write(render(runs).encode(errors="backslashreplace")))
    return [page, *(_pictures(runs[0], folder) if pictures and len(runs) == 1 else [])]


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    """Runs with names that differ: their paths, where the last part does not tell them apart."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else run._replace(name=run.path) for run in runs]


# ---- curves ---------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str, list[Series]]]:
    """(title, file name, lines) of each chart that has any."""
    for title, name, keys in (*CHARTS, *_own_charts(runs)):
        series = []
        for number, run in enumerate(runs):
            for k, (key, role) in enumerate(keys):
                words = role if len(runs) == 1 else " ".join(filter(None, (run.name, role)))
                dashed = len(runs) > 1 and k == 0 < len(keys) - 1
                series.append(Series(words, _points(run.log, key), colour(k if len(runs) == 1 else number), dashed))
        series = [s for s in series if s.points]
        if series:
            yield title, name, series


_OF_A_LINE = {"epoch", "iteration", "elapsed_time", "epoch_detail", "memory_bytes", "device_memory_bytes"}
_MAX_CHARTS = 24  # of values that this file does not know


def _own_charts(runs: Sequence[RunRecord]) -> list[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """Charts of what else was observed: the user's metrics, for training and test together."""
    known = {key for _, _, keys in CHARTS for key, _ in keys} | _OF_A_LINE
    own: dict[str, list[str]] = {}
    for run in runs:
        for key in dict.fromkeys(key for entry in run.log for key in entry):
            if key not in known and any(_number(entry.get(key)) is not None for entry in run.log):
                own.setdefault(key.removeprefix("validation/").removeprefix("main/"), []).append(key)
    charts, taken = [], {name for _, name, _ in CHARTS}
    for title in [*own][:_MAX_CHARTS]:
        name = re.sub(r"[^\w.-]+", "_", title)
        while name in taken:
            name += "_"
        taken.add(name)
        charts.append((title, name, tuple((key, _role(key)) for key in sorted(set(own[title])))))
    return charts


def _role(key: str) -> str:
    return "test" if key.startswith("validation/") else "training" if key.startswith("main/") else ""


def _number(value: Any) -> float | None:
    """A value that can be drawn; None for all others."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:  # NaN is not
        return float(value)
    return None


def _points(log: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(epoch, value) of each line; of many the least and the greatest of each stretch, so that no extreme is lost."""
    found = [(_epoch(entry), number) for entry in log if (number := _number(entry.get(key))) is not None]
    if len(found) <= _MAX_POINTS:
        return found
    kept = {0, len(found) - 1}
    length = -(-2 * len(found) // _MAX_POINTS)
    for begin in range(0, len(found), length):
        stretch = range(begin, min(begin + length, len(found)))
        kept |= {min(stretch, key=lambda i: found[i][1]), max(stretch, key=lambda i: found[i][1])}
    return [found[i] for i in sorted(kept)]


def _epoch(entry: dict[str, Any]) -> float:
    return _number(entry.get("epoch_detail", entry.get("epoch", 0))) or 0.0


def _legend(runs: Sequence[RunRecord], series: Sequence[Series]) -> list[Key] | None:
    """Of several runs: each run's colour once, and what dashes say; None for the one that lines make."""
    if len(runs) == 1:
        return None
    drawn = {s.colour for s in series}
    keys = [Key(run.name, colour(number)) for number, run in enumerate(runs) if colour(number) in drawn]
    if any(s.dashed for s in series):
        keys += [Key("training", None, dashed=True), Key("test", None)]
    return keys


def _pictures(run: RunRecord, folder: str) -> list[str]:
    """The curves as PNG; none without matplotlib."""
    if not plotting.is_installed():
        return []
    paths = []
    for title, name, series in curves([run]):
        figure, ((axes,),) = plotting.new_figure(1, 1, (7, 4))
        for s in series:
            marker = "o" if len(s.points) == 1 else ""
            axes.plot(*zip(*s.points), color=s.colour, label=s.name, marker=marker)
        axes.set(title=title, xlabel="epoch")
        plotting.draw_grid(axes, True)
        if any(s.name for s in series):
            axes.legend()
        paths.append(os.path.join(folder, f"{name}.png"))
        plotting.save_figure(figure, paths[-1])
    return paths


# ---- the page -------------------------------------------------------------------------------------------------------


def render(runs: Sequence[RunRecord]) -> str:
    """The page as text."""
    title = " and ".join(run.name for run in runs) if len(runs) <= _MAX_IN_TITLE else f"{len(runs)} runs"
    charts = "".join(
        f"<div>{chart(name, 'epoch', series, _legend(runs, series))}</div>" for name, _, series in curves(runs)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{html.escape(title)}</h1>{_headline(runs)}"
        f'<div class="charts">{charts}</div>'
        f'<h2>Facts</h2><div class="scroll">{_facts(runs)}</div>{_configurations(runs)}</html>\n'
    )


def _headline(runs: Sequence[RunRecord]) -> str:
    lines = []
    for run in runs:
        status = str(run.summary["status"])
        kind = status if status in ("finished", "failed") else ""
        name = f"{html.escape(run.name)}: " if len(runs) > 1 else ""
        words = "".join(f", {html.escape(words)}" for words in _last(run))
        lines.append(f'<div>{name}<b class="{kind}">{html.escape(status)}</b>{words}</div>')
    return "".join(lines)


def _last(run: RunRecord) -> Iterator[str]:
    """The last value of what people ask for first."""
    for key, words, form in (
        ("validation/main/accuracy", "test accuracy", lambda value: f"{100 * value:.2f} %"),
        ("validation/main/loss", "test loss", "{:.4g}".format),
        ("main/loss", "training loss", "{:.4g}".format),
    ):
        last = next((entry for entry in reversed(run.log) if key in entry), None)
        if last is not None:
            number = _number(last[key])
            yield f"{words} {'not a finite number' if number is None else form(number)}"


def _facts(runs: Sequence[RunRecord]) -> str:
    rows = []
    if len(runs) > 1:
        rows.append("<tr><th></th>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs) + "</tr>")
    for key, words in _FACTS:
        values = [run.summary.get(key) for run in runs]
        if any(value not in (None, 0, "") for value in values) or key == "seed":
            cells = "".join(f"<td>{html.escape(_shown(value))}</td>" for value in values)
            rows.append(f"<tr><th>{words}</th>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _configurations(runs: Sequence[RunRecord]) -> str:
    """Each configuration; of several, first the lines in which they differ."""
    parts = []
    for run in runs:
        name = "" if len(runs) == 1 else f" of {html.escape(run.name)}"
        text = run.config
        if len(runs) > 1:
            others = [set(other.config.splitlines()) for other in runs if other is not run]
            own = [line.strip() for line in text.splitlines() if not all(line in other for other in others)]
            text = "\n".join(own) or "as the others'"
        words = "Configuration" if len(runs) == 1 else "What differs in the configuration"
        parts.append(f"<h2>{words}{name}</h2><pre>{html.escape(text)}</pre>")
    return "".join(parts)
