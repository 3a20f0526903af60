"""The page about runs, as HTML: a report is all of it in a file, and `--watch` sends its sections while runs continue.

Every text that comes from a folder is escaped here; the page holds no script.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from dbrdist.cli.configuration import document
from dbrdist.cli.inspection.chart import chart, colour
from dbrdist.cli.inspection.curves import curves, legend
from dbrdist.cli.inspection.records import RunRecord, number
from dbrdist.cli.output.words import as_percent
from dbrdist.training.extensions.progress_bar import duration

_MAX_IN_TITLE = 3  # runs; the names of more stand below the title, each on its line
_MAX_OPEN = 3  # runs; of more, ranks, images and messages are shown when one asks for them
_MAX_RANKS_SHOWN = 32
_MAX_CONFIG_CHARACTERS = 1 << 17  # of a configuration that is compared key by key
_MAX_DIFFERENCES = 500
_LATE_SECONDS = 30.0  # without a word of a rank that is said to run

_FACTS = (
    ("status", "status"),
    ("reason", "reason"),
    ("epochs", "epochs"),
    ("iterations", "steps"),
    ("began", "began"),
    ("ended", "ended"),
    ("seconds_over_all_starts", "seconds of training"),
    ("num_parameters", "parameters"),
    ("device_memory_bytes", "largest memory of rank 0's GPU, bytes"),
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
SECURITY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # what the page may load
STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--soft:#5c5c5c;--line:#dcdcdc;--page:#fff;--good:#1d7a3a;--bad:#b3261e;
--bar:#1f77c4}
@media(prefers-color-scheme:dark){
:root{--ink:#e9e9e9;--soft:#a6a6a6;--line:#3a3a3a;--page:#161616;--good:#67c587;--bad:#f2807a;--bar:#5b9bd5}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;
color:var(--ink);background:var(--page)}
h1{font-size:1.5rem;margin-bottom:.2rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem}
h3{font-size:.9rem;margin:.4rem 0 0}summary{margin-top:.6rem;cursor:pointer}summary h2{display:inline;margin:0}
.swatch{display:inline-block;width:1.1em;height:.25em;margin-right:.5em;vertical-align:middle}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1.2rem;margin-top:1.2rem}
svg{width:100%;height:auto;border:1px solid var(--line);border-radius:6px}
svg text{fill:var(--ink);font-size:12px}svg .title{font-weight:600;font-size:13px}svg .tick{fill:var(--soft)}
svg .grid{stroke:var(--line);fill:none}svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem 1.2rem .15rem 0;vertical-align:top}
th{font-weight:600;white-space:nowrap}td{overflow-wrap:anywhere;min-width:6rem}
td.state{min-width:11rem}.scroll{overflow-x:auto}
td.figure{text-align:right;min-width:0;white-space:nowrap;font-variant-numeric:tabular-nums}
pre{background:color-mix(in srgb,var(--ink) 6%,var(--page));padding:.8rem;border-radius:6px;
overflow-x:auto;font-size:13px}
.messages{max-height:18rem;overflow:auto}
.finished{color:var(--good)}.failed,.gone,.problem,.wrong{color:var(--bad)}.soft{color:var(--soft)}
progress{width:min(100%,24rem);accent-color:var(--bar)}
.examples{display:flex;flex-wrap:wrap;gap:.8rem}.examples figure{margin:0;width:112px;font-size:12px;line-height:1.35}
.examples img{width:96px;height:96px;object-fit:contain;image-rendering:pixelated;background:var(--line);display:block}
figcaption{overflow-wrap:anywhere}
"""


def title_of(runs: Sequence[RunRecord]) -> str:
    """The title of a page on these runs."""
    return " and ".join(run.name for run in runs) if len(runs) <= _MAX_IN_TITLE else f"{len(runs)} runs"


def render(runs: Sequence[RunRecord]) -> str:
    """The page as text, which loads nothing else."""
    return head(title_of(runs), STYLE, SECURITY) + body(sections(runs)) + "</html>\n"


def head(title: str, style: str, security: str) -> str:
    """The beginning of a page, up to its heading."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{security}">'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style><h1>{html.escape(title)}</h1>'
    )


def body(parts: dict[str, str]) -> str:
    """The sections of a page, each in an element of its own."""
    return "".join(f'<div id="{name}">{text}</div>' for name, text in parts.items())


def sections(runs: Sequence[RunRecord], now: float | None = None, with_charts: bool = True) -> dict[str, str]:
    """The sections of the page by name; `now` is the time for a run that continues, and None for a report."""
    configurations = {"configurations": _configurations(runs)}
    is_comparison = len(runs) > 1  # which begins with what differs
    return {
        "headline": _headline(runs) + _problems(runs),
        "progress": "" if now is None else _progress(runs),
        "charts": f'<div class="charts">{_charts(runs)}</div>' if with_charts else "",
        **(configurations if is_comparison else {}),
        "ranks": _ranks(runs, now),
        "examples": _examples(runs),
        "messages": _messages(runs),
        "facts": f'<h2>Facts</h2><div class="scroll">{_facts(runs)}</div>',
        **configurations,
    }


def _charts(runs: Sequence[RunRecord]) -> str:
    return "".join(
        f"<div>{chart(name, 'epoch', series, legend(runs, series))}</div>" for name, _, series in curves(runs)
    )


def _headline(runs: Sequence[RunRecord]) -> str:
    lines = []
    for number_of_run, run in enumerate(runs):
        status = str(run.summary["status"])
        kind = status if status in ("finished", "failed") else ""
        line = f'<span class="swatch" style="background:{colour(number_of_run)}"></span>'  # as in the charts
        name = f"{line}{html.escape(run.name)}: " if len(runs) > 1 else ""
        words = "".join(f", {html.escape(words)}" for words in _last(run))
        lines.append(f'<div>{name}<b class="{kind}">{html.escape(status)}</b>{words}</div>')
    return "".join(lines)


def _last(run: RunRecord) -> Iterator[str]:
    """The last value of what people ask for first."""
    for key, words, form in (
        ("validation/main/accuracy", "test accuracy", as_percent),
        ("validation/main/loss", "test loss", "{:.4g}".format),
        ("main/loss", "training loss", "{:.4g}".format),
    ):
        last = next((entry for entry in reversed(run.log) if key in entry), None)
        if last is not None:
            value = number(last[key])
            yield f"{words} {'not a finite number' if value is None else form(value)}"


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


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _problems(runs: Sequence[RunRecord]) -> str:
    return "".join(f'<div class="problem">{html.escape(words)}</div>' for run in runs for words in run.problems)


def _part(words: str, run: RunRecord, runs: Sequence[RunRecord], text: str) -> str:
    """A part of the page under its heading; with the run's name, and to fold, where there are several."""
    if len(runs) == 1:
        return f"<h2>{words}</h2>{text}"
    state = " open" if len(runs) <= _MAX_OPEN else ""
    return f"<details{state}><summary><h2>{words} of {html.escape(run.name)}</h2></summary>{text}</details>"


# ---- how far a run is -----------------------------------------------------------------------------------------------


def _progress(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        state = dict(run.ranks[0]) if run.ranks and run.summary["status"] == "running" else {}
        epoch, total, step = (number(state.get(key)) for key in ("epoch", "num_epochs", "step"))
        if epoch is None or not total or step is None:
            continue
        words = [f"epoch {epoch:.2f} of {total:g}", f"step {step:,.0f}"]
        speed, left = number(state.get("examples_per_second")), number(state.get("seconds_left"))
        words += [f"{speed:,.0f} examples/s"] if speed is not None else []
        words += [f"{duration(left)} left"] if left is not None else []
        name = f"{html.escape(run.name)}: " if len(runs) > 1 else ""
        bar = f'<progress max="1" value="{min(epoch / total, 1):.4f}" aria-label="progress"></progress>'
        parts.append(f"<div>{name}{', '.join(words)}<br>{bar}</div>")
    return "".join(parts)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def own_seconds(state: dict[str, Any]) -> float | None:
    """The seconds per step that a rank did not spend in communication, which includes waiting for slower ranks."""
    seconds, share = number(state.get("seconds_per_step")), number(state.get("communication_fraction"))
    return None if seconds is None else seconds * (1 - min(max(share or 0.0, 0.0), 1.0))


def slowest(states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank whose own part of a step takes longest; None where a single rank, or no rank, says how long it takes."""
    known = [(seconds, state) for state in states if (seconds := own_seconds(state)) is not None]
    return max(known, key=lambda pair: pair[0])[1] if len(known) > 1 else None


def _ranks(runs: Sequence[RunRecord], now: float | None) -> str:
    return "".join(_part("Ranks", run, runs, _slowest_words(run) + _rank_table(run, now)) for run in runs if run.ranks)


def _slowest_words(run: RunRecord) -> str:
    state = slowest(run.ranks)
    if state is None:
        return ""
    own = [seconds for other in run.ranks if (seconds := own_seconds(other)) is not None]
    most, middle = max(own), statistics.median(own)
    more = f", {100 * (most / middle - 1):.0f} % more than the median" if middle > 0 and most > middle * 1.005 else ""
    where = html.escape(_shown(state.get("host")))
    return f"<p>The slowest is rank {state['rank']} on {where}: {most * 1e3:,.1f} ms of its own in each step{more}.</p>"


def _rank_table(run: RunRecord, now: float | None) -> str:
    slow, steps = slowest(run.ranks), [number(state.get("step")) or 0.0 for state in run.ranks]
    last = max(steps)
    order = list(range(len(steps)))
    if len(order) > _MAX_RANKS_SHOWN:  # those that lag behind, then those that take longest
        order.sort(key=lambda i: (steps[i], -(own_seconds(run.ranks[i]) or 0.0)))
    rows = [_rank_row(run, i, run.ranks[i] is slow, steps[i] < last, now) for i in order[:_MAX_RANKS_SHOWN]]
    rest = len(order) - len(rows)
    words = f'<p class="soft">and {rest:,} other ranks, which are further or faster</p>' if rest > 0 else ""
    heads = ("rank", "host", "state", "step", "step time", "waiting for data", "communicating", "memory")
    if _any_on_gpu(run):
        heads = (*heads, "GPU memory")
    titles = "".join(f"<th>{words}</th>" for words in heads)
    return f'<div class="scroll"><table><tr>{titles}</tr>{"".join(rows)}</table></div>{words}'


def _any_on_gpu(run: RunRecord) -> bool:
    return any(number(state.get("device_memory_bytes")) is not None for state in run.ranks)


def _rank_row(run: RunRecord, i: int, is_slowest: bool, is_behind: bool, now: float | None) -> str:
    state = run.ranks[i]
    names = ("seconds_per_step", "data_wait_fraction", "communication_fraction", "memory_bytes", "device_memory_bytes")
    seconds, waits, sends, memory, on_device = (number(state.get(key)) for key in names)
    figures = (
        _shown(state.get("step")),
        "" if seconds is None else f"{seconds * 1e3:,.1f} ms",
        "" if waits is None else f"{100 * waits:.0f} %",
        "" if sends is None else f"{100 * sends:.0f} %",
        "" if memory is None else f"{memory / 1e9:,.2f} GB",
        *(["" if on_device is None else f"{on_device / 1e9:,.2f} GB"] if _any_on_gpu(run) else []),
    )
    words, kind = _state_of_rank(run, state, now)
    notes = [words, *(["slowest"] if is_slowest else []), *(["behind"] if is_behind and kind != "finished" else [])]
    cells = "".join(f'<td class="figure">{html.escape(text)}</td>' for text in figures)
    return (
        f'<tr><td class="figure">{_shown(state["rank"])}</td><td>{html.escape(_shown(state.get("host")))}</td>'
        f'<td class="state {kind}">{html.escape(", ".join(notes))}</td>{cells}</tr>'
    )


def _state_of_rank(run: RunRecord, state: dict[str, Any], now: float | None) -> tuple[str, str]:
    """What a rank does, and the class of the words."""
    if isinstance(state.get("error"), str):
        return f"ended: {state['error']}", "failed"
    if state.get("ended"):
        return "ended", "finished" if run.summary["status"] == "finished" else ""
    if run.summary["status"] != "running":
        return "did not end by itself", "failed"
    if now is None:
        return "running", ""
    age = max(now - (number(state.get("time")) or 0.0), 0.0)
    if age > _LATE_SECONDS:
        return f"no step for {duration(age)}: evaluating, saving, waiting or stopped", "problem"
    return "running", ""


# ---- test images ----------------------------------------------------------------------------------------------------


def _examples(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        for key, words in (("worst", "Worst mistakes"), ("first", "Predictions")):
            shown = run.examples.get(key)
            found = [_example(one, run.examples.get("classes")) for one in shown] if isinstance(shown, list) else []
            if any(found):
                when = number(run.examples.get("epoch"))
                after = "" if when is None else f'<p class="soft">test images after epoch {when:.4g}</p>'
                parts.append(_part(words, run, runs, f'{after}<div class="examples">{"".join(found)}</div>'))
    return "".join(parts)


def _example(one: Any, classes: Sequence[str] | None) -> str:
    """An image with its label and the likeliest classes; nothing where the file holds no such thing."""
    if not isinstance(one, dict):
        return ""
    picture, label, guesses = one.get("image"), one.get("label"), one.get("likeliest")
    if not isinstance(picture, str) or not set(picture) <= _BASE64 or not isinstance(guesses, list):
        return ""
    lines: list[str] = []
    for guess in guesses[:3]:
        if isinstance(guess, list) and len(guess) == 2 and (share := number(guess[1])) is not None:
            kind = "soft" if lines else "finished" if guess[0] == label else "wrong"
            lines.append(
                f'<span class="{kind}">{html.escape(_class_name(guess[0], classes))} {100 * share:.1f} %</span>'
            )
    return (
        f'<figure><img alt="" src="data:image/png;base64,{picture}"><figcaption><b>'
        f"{html.escape(_class_name(label, classes))}</b><br>{'<br>'.join(lines)}</figcaption></figure>"
    )


_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")


def _class_name(label: Any, classes: Sequence[str] | None) -> str:
    if isinstance(classes, list) and type(label) is int and 0 <= label < len(classes):
        return str(classes[label])[:100]
    return _shown(label)[:100]


# ---- messages and configurations ------------------------------------------------------------------------------------


def _messages(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        if run.messages:
            text = html.escape("\n".join(run.messages))
            parts.append(_part("Messages", run, runs, f'<pre class="messages" tabindex="0">{text}</pre>'))
    return "".join(parts)


def _configurations(runs: Sequence[RunRecord]) -> str:
    """The configuration of one run; of several, the entries in which they differ."""
    if len(runs) == 1:
        return f"<h2>Configuration</h2><pre>{html.escape(runs[0].config)}</pre>"
    found = [_entries(run.config) for run in runs]
    keys = list(dict.fromkeys(key for entries in found for key in entries))
    rows = []
    for key in keys:
        values = [entries.get(key, "") for entries in found]
        if len(set(values)) > 1 and len(rows) < _MAX_DIFFERENCES:
            cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
            rows.append(f"<tr><th>{html.escape(key)}</th>{cells}</tr>")
    if not rows:
        return "<h2>Differences of the configurations</h2><p>The configurations are the same.</p>"
    names = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    table = f"<table><tr><th></th>{names}</tr>{''.join(rows)}</table>"
    return f'<h2>Differences of the configurations</h2><div class="scroll">{table}</div>'


def _entries(text: str) -> dict[str, str]:
    """The entries of a configuration by their keys, such as `optimizer.lr`; its lines where it is none."""
    if len(text) <= _MAX_CONFIG_CHARACTERS:
        read = document.read(text, "")
        if isinstance(read.data, dict) and not read.problems:
            return dict(_flat(read.data, ""))
    return {f"line {i}": line for i, line in enumerate(text.splitlines(), 1)}


def _flat(data: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, dict | list) and data:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, "null" if data is None else str(data).lower() if isinstance(data, bool) else str(data)
