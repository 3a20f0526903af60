"""Writes docs/figures.md from the newest records.

    python benchmarks/figures.py          # say what would change
    python benchmarks/figures.py --write

Each row takes one kind of record. Of the records of a kind the newest from each processor counts, since a ratio holds
for the machine on which it was taken. What is not reached is said by the figure beside its goal.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "figures.md"

Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A figure: what it is of, the goal, the kinds of records that it comes from, and how it is said."""

    what: str
    goal: str
    kinds: str  # of one record, or several with a blank between
    say: Callable[..., str]  # from the results of each
    is_awaited: bool = False  # left out as long as there is no record


def _seconds(results: Results, *labels: str, scale: float, digits: int = 0) -> str:
    return " and ".join(f"{results[label]['median_seconds'] * scale:,.{digits}f}" for label in labels)


def _steps(r: Results, unit: str = "ms", digits: int = 0) -> str:
    """Our time as a part of PyTorch's, and both."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    return f"{r['ratio']:.2f}: {_seconds(r, 'dbrdist', 'torch', scale=scale, digits=digits)} {unit}"


def _overhead(r: Results) -> str:
    interpreted = r["interpreted"]["median_seconds"] / r["torch"]["median_seconds"]
    return f"{_steps(r, 'us')}; interpreted {interpreted:.2f}: {_seconds(r, 'interpreted', scale=1e6)} us"


def _memory(r: Results) -> str:
    ours, theirs = (r[label]["peak_bytes"] / 2**20 for label in ("dbrdist", "torch"))
    return f"{ours / theirs:.2f}: {ours:,.0f} and {theirs:,.0f} MiB"


def _gpu(r32: Results, r16: Results) -> str:
    parts = []
    for r in (r32["resnet50, batch 128"], r16["resnet50, batch 128"]):
        ratio = r["dbrdist"]["median_seconds"] / r["torch"]["median_seconds"]
        parts.append(f"{ratio:.2f}: {_seconds(r, 'dbrdist', 'torch', scale=1e3, digits=1)} ms")
    return "; ".join(parts)


def _ratios(r: Results) -> dict[str, float]:
    return {name: case["ratio"] for name, case in r.items() if isinstance(case, dict) and "ratio" in case}


def _above(ratios: dict[str, float]) -> str:
    """The names of those above 1.2, the slowest first."""
    slow = sorted(((v, k) for k, v in ratios.items() if v > 1.2), reverse=True)
    return ", ".join(f"`{name}` {value:.1f}" for value, name in slow)


def _elementwise(r: Results) -> str:
    found = _ratios(r)
    names = _above(found)
    return f"{len(found)} functions: median {statistics.median(found.values()):.2f}; above 1.20: {names or 'none'}"


def _vocabulary(r: Results) -> str:
    found = _ratios(r)
    num_slow = sum(value > 1.2 for value in found.values())
    return (
        f"{len(found)} functions: median {statistics.median(found.values()):.2f}; {num_slow} above 1.20, mostly "
        f"because a leaf copies a gradient that is a view, where Chainer keeps the view: {_above(found)}"
    )


def _convnets(r: Results) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in _ratios(r).items())


def _of(r: Results, *path: str) -> str:
    value: Any = r
    for name in path:
        value = value[name]
    return f"{value:.2f}"


def _large(r: Results) -> str:
    large = r["large"]
    parts = [_of(large, "ratios", f"float32 / {peer} float32", "ratio") for peer in ("MPI_Allreduce", "gloo")]
    names = "float32", "MPI_Allreduce float32", "gloo float32"
    times = ", ".join(_seconds(large, name, scale=1e3) for name in names)
    return f"{'; '.join(parts)}: {times} ms"


def _large_bfloat16(r: Results) -> str:
    large = r["large"]
    ratio = _of(large, "ratios", "bfloat16 / gloo bfloat16", "ratio")
    return f"{ratio}: {_seconds(large, 'bfloat16', 'gloo bfloat16', scale=1e3)} ms"


def _small(r: Results) -> str:
    two = _of(r, "small", "ratios", "multi-node / Allreduce", "ratio")
    return f"{two}; {_of(r, 'small on one rank', 'ratios', 'multi-node / alone', 'ratio')}"


def _together(r: Results) -> str:
    ours, peers = [], []
    for name in ("resnet20 on one host", "resnet50 on one host"):
        figures = r[name]["figures"]
        ours.append(f"{figures['together']['throughput']:.3f}")
        peers.append(f"{figures['torch DDP']['throughput']:.2f}")
    return f"{'; '.join(ours)} (PyTorch's DDP over gloo: {'; '.join(peers)})"


def _exposed(r: Results) -> str:
    figures = r["resnet50 on two hosts"]["figures"]
    return f"{figures['together']['exposed']:.2f} (DDP: {figures['torch DDP']['exposed']:.2f})"


def _run_cost(r: Results) -> str:
    added, spread = r["resnet20"]["added"], r["resnet20"]["run"]
    part = f"{100 * r['resnet20']['added_fraction']:.1f} %"
    if abs(added["median_seconds"]) < spread["max_seconds"] - spread["min_seconds"]:
        part += ", less than the spread"
    return f"{part}; {_seconds(r['mlp'], 'added', scale=1e6)} us"


def _loader(r: Results) -> str:
    return (
        f"{_of(r, 'uint8', 'of_by_hand')}; {_of(r, 'uint8', 'of_pillow')} "
        f"(a hand-written loop: {_of(r, 'by_hand', 'of_pillow')}; `decode: fast`: {_of(r, 'fast', 'of_pillow')})"
    )


def _loader_torch(r: Results) -> str:
    return "; ".join(f"{r[name]['ours_relative']:.2f}" for name in ("pillow", "simplejpeg"))


def _many_files(r: Results) -> str:
    scan, index = r["scan"], r["index"]
    more = max(found["host_bytes_more"] for found in r.values()) / 1e6
    return f"{scan['seconds']:.1f} s, with an index {index['seconds']:.1f} s; {more:.0f} MB"


def _pause(r: Results) -> str:
    background = r["background"]
    pauses = f"{background['median_seconds']:.3f} s, {max(background['pauses']):.3f} at most"
    return f"{pauses}; written at once {r['at once']['median_seconds']:.2f} s"


def _rehearsal(r: Results) -> str:
    ratios = {key: found["measured"] / found["predicted"] for key, found in r.items()}
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1))
    return f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} (furthest: {worst})"


def _sharing(r: Results) -> str:
    ours, plain = (r[name]["state_bytes_per_rank"][0] / 1e6 for name in ("zero=1", "plain"))
    two = f"`zero=2`, half the gradients too: {r['zero=2']['ratio_to_plain']:.1f}"
    return f"{ours / plain:.2f}: {ours:.0f} and {plain:.0f} MB; {_of(r, 'zero=1', 'ratio_to_plain')} ({two})"


def _wire(r: Results) -> str:
    ways = "bfloat16", "PowerSGD rank 2", "top 1 %"
    return "; ".join(" and ".join(_of(r, rate, way, "time_of_plain") for rate in ("1gbit", "100mbit")) for way in ways)


def _accuracy(r: Results) -> str:
    ways = "plain", "bfloat16 transfer", "PowerSGD rank 2", "top 1 %", "local_steps=8"
    return "; ".join(f"{100 * r[way]['test_accuracy']:.1f}" for way in ways) + " %"


def _auto(r: Results) -> str:
    rows = [row for place in r.values() for row in place.values()]
    worst = max(row["auto_to"][row["fastest"]] for row in rows)
    taken = sum(row["auto"] == row["fastest"] for row in rows)
    return f"{worst:.2f}; it chose the fastest in {taken} of {len(rows)} cases"


def _observed(r: Results) -> str:
    """What observers add to the time of each run, with the interval."""
    return "; ".join(
        f"{name} {added['median']:.1%} [{added['low']:.1%}, {added['high']:.1%}]".replace("%", " %")
        for name, added in ((case, found["overhead"]) for case, found in r.items())
    )


def _verbs(r: Results) -> str:
    """Times of small verbs, and that of bcast_data relative to MPI's."""
    us = {name: 1e6 * r[name]["median_seconds"] for name in ("round trip", "split", "finalize")}
    ratio = r["bcast_data of other values"]["median_seconds"] / r["Bcast of MPI"]["median_seconds"]
    return f"{us['round trip']:.1f} us; {us['split'] / 1e3:.2f} and {us['finalize'] / 1e3:.2f} ms; {ratio:.2f}"


def _tutorial(r: Results) -> str:
    return (
        f"{r['seconds']:.0f} s: installation {r['install_seconds']:.0f} s, commands {sum(r['commands'].values()):.0f} s"
    )


def _trace(r: Results) -> str:
    return f"{100 * r['trace_fraction_by_steps']:.1f} %; {100 * r['audit_fraction']:.3f} %"


def _language_models(char: Results, ptb: Results) -> str:
    digits = ((char, 4), (ptb, 1))
    return "; ".join(" and ".join(f"{r[side]['figure']:.{n}f}" for side in ("dbrdist", "torch")) for r, n in digits)


def _reproducible(r: Results) -> str:
    return "equal" if r["momentum"]["is_one_hash"] and r["lars"]["is_one_hash"] else "NOT equal"


def _reproducible_steps(r: Results) -> str:
    steps = r["step_seconds_on_2_ranks"]
    plain = steps["plain"]["median_seconds"]
    return " and ".join(f"{steps[f'{n} workers']['median_seconds'] / plain:.2f}" for n in (2, 8))


def _index(r: Results) -> str:
    return f"{_of(r, 'open_seconds', 'median_seconds')} s; {r['host_bytes'] / 1e6:.0f} MB"


def _mutants(*records: Results) -> str:
    killed, judged = sum(r["killed"] for r in records), sum(r["killed"] + r["survived"] for r in records)
    return f"{100 * killed / judged:.1f} % ({killed} of {judged})"


def _wrong_formulas(r: Results) -> str:
    judged = r["noticed"] + r["survived"]
    return f"{r['noticed']:,} of {judged:,} noticed; {r['equivalent']} equivalent, {r['not judged']} not judged"


def _digits(r: Results) -> str:
    return f"{100 * r['metrics']['validation/main/accuracy']:.2f} % in {r['wall']['median_seconds']:.1f} s"


def _cifar10(r: Results) -> str:
    return f"{100 * r['metrics']['validation/main/accuracy']:.2f} % in {r['wall']['median_seconds']:.0f} s"


def _memorised(r: Results) -> str:
    steps, seconds = r["iterations"], r["wall"]["median_seconds"]
    first, last = r["first_iteration_with_loss_below_goal"], r["metrics"]["main/loss"]
    return f"from step {first} on; {last:.2f} after {steps} steps, {seconds:.0f} s"


GROUPS: dict[str, list[Row]] = {
    "Training steps and inference on CPUs": [
        Row(
            "full step of an MLP of 3 layers of 8 units, batch 8, one thread, against PyTorch 2.13 eager",
            "at most 15 % of its time; 30 % interpreted", "overhead", _overhead,
        ),
        Row(
            "full step of ResNet-50, batch 16, 224x224, float32, one thread, against PyTorch 2.13 channels-last",
            "0.78 of its time", "resnet50", _steps,
        ),
        Row("the same step: peak memory", "0.60 of its memory", "resnet50", _memory),
        Row(
            "full step of ResNet-50 in `mixedbf16`, against PyTorch's autocast", "0.87 of its time",
            "resnet50-mixedbf16", _steps,
        ),
        Row(
            "inference with ResNet-50, batch 1, float32", "0.90 of its time", "resnet50-batch1-inference", _steps,
        ),
        Row(
            "full step of ResNet-20, 32x32, batch 128, float32, one thread, against PyTorch 2.13 channels-last",
            "0.80 of its time", "resnet20", _steps,
        ),
        Row("the same in `mixedbf16`, against PyTorch's autocast", "0.67 of its time", "resnet20-mixedbf16", _steps),
        Row(
            "full step of ResNet-20, 8x8, batch 1", "0.70 of its time", "resnet20-8x8-batch1",
            lambda r: _steps(r, digits=1),
        ),
        Row(
            "full step of a language model with 2 LSTM layers of 650 units, batch 20, 35 steps, against `nn.LSTM`",
            "1.0 of its time", "lstm", _steps,
        ),
        Row(
            "full step of a Transformer block, 256 wide, 4 heads, 128 tokens, batch 16, against "
            "`nn.TransformerEncoderLayer`",
            "0.85 of its time, also of `torch.compile`", "transformer", _steps,
        ),
        Row("the same, 768 wide, 12 heads, batch 8", "0.90 of its time", "transformer-768x128", _steps),
        Row(
            "the same, 768 wide, 512 tokens, batch 2", "0.85 of its time", "transformer-768x512", _steps,
            is_awaited=True,
        ),
        Row(
            "an update of 10 million float32 parameters by one of six rules, one thread, against PyTorch's fused ones",
            "1.0 of its time", "updates", lambda r: _elementwise(r).replace("functions", "rules"),
        ),
        Row(
            "elementwise functions, activations and losses, forward and backward, 1 M float32, against PyTorch 2.13",
            "median 0.85, each 1.20", "elementwise", _elementwise,
        ),
        Row(
            "networks of convnet-benchmarks, forward and backward, one thread, against PyTorch 2.13",
            "each 1.00", "convnets", _convnets,
        ),
        Row(
            "functions, forward and backward with the sizes of Chainer's examples, against Chainer 7.8.1 on NumPy 1.23",
            "median 0.50, each 1.20 of its time", "vocabulary", _vocabulary,
        ),
        Row(
            "`import dbrdist, dbrdist.functions, dbrdist.links`, without the time for NumPy", "0.25 s", "imports",
            lambda r: f"{_of(r, 'beyond_numpy', 'median_seconds')} s",
        ),
    ],
    "One GPU": [
        Row(
            "full step of ResNet-50, batch 128, TF32; float16; against PyTorch 2.11 eager", "-",
            "gpu-steps-float32 gpu-steps-float16", _gpu,
        ),
    ],
    "Several ranks": [
        Row(
            "adding 102 MB of float32 gradients of 2 ranks on one host, against MPI_Allreduce; against gloo",
            "0.30; 0.20 of its time", "reduction", _large,
        ),
        Row("the same in bfloat16, against gloo", "0.25", "reduction", _large_bfloat16),
        Row(
            "the same with both cores busy", "0.40; 0.20", "reduction-busy",
            lambda r: "; ".join(
                _of(r, "large", "ratios", f"float32 / {peer} float32", "ratio") for peer in ("MPI_Allreduce", "gloo")
            ),
        ),
        Row(
            "a step with 10 KB of gradients, 2 ranks, against the same with a bare Allreduce; one rank against the "
            "plain optimizer",
            "1.3; 1.15 of its time", "reduction", _small,
        ),
        Row(
            "2 ranks together, against two independent runs at the same time: ResNet-20; ResNet-50",
            "0.98 of the throughput", "data-parallel", _together,
        ),
        Row(
            "the same with ResNet-50 at batch 8 on two hosts (namespaces, 1 Gb/s): exposed communication",
            "0.25 of the reduction", "data-parallel", _exposed,
        ),
        Row(
            "102 MB and 10 KB on one host and two, 2 to 4 ranks: `auto` against the fastest communicator", "1.10",
            "reduction-table", _auto,
        ),
        Row(
            "Adam's state per rank with `zero=1` on 2 ranks; the step's time", "half; 1.1 of plain", "sharing",
            _sharing,
        ),
        Row(
            "one reduction of ResNet-50's 102 MB between two hosts at 1 Gb/s and 100 Mb/s, relative to a plain one: "
            "bfloat16; PowerSGD of rank 2; top 1 %",
            "-", "wire", _wire,
        ),
        Row(
            "CIFAR-10 after ten epochs, small network: plain; bfloat16; PowerSGD of rank 2; top 1 %; 8 local steps",
            "-", "compression-accuracy", _accuracy,
        ),
        Row(
            "`reproducible: true`: bits of ResNet-20 on CIFAR-10 after 100 steps, on 1, 2, 3, 4 and 8 ranks, and "
            "resumed 1->2, 2->1, 4->3, 3->8, with momentum and with LARS",
            "equal", "reproducible", _reproducible,
        ),
        Row(
            "the same: time of a step on 2 ranks, with 2 and with 8 virtual workers", "1.3 of the plain step",
            "reproducible", _reproducible_steps,
        ),
        Row(
            "random jobs whose ranks disagree: without the right error on every rank; that hung; the longest time",
            "0; 0; -",
            "random-disagreements",
            lambda r: f"{r['num_wrong']}; {r['num_hung']}; {r['max_seconds']:.1f} s, of {r['num_disagreements']} in "
            f"{r['num_jobs']} jobs",
        ),
    ],
    "Data and runs": [
        Row(
            "JPEG photographs to a uint8 batch, one core, against a hand-written loop; against Pillow",
            "0.95; 1.7 times as fast", "loader-full", _loader,
        ),
        Row("the same with prepared copies of 256 pixels", "0.95; 2.3", "loader-prepared", _loader),
        Row(
            "two loader threads on two cores, against one: photographs; prepared copies", "1.8",
            "loader-full loader-prepared",
            lambda full, prepared: "; ".join(_of(r, "threads", "two_of_one") for r in (full, prepared)),
        ),
        Row(
            "opening an index of 1.28 M images; memory of a host with 4 ranks and 8 workers", "2 s; 200 MB",
            "image-index", _index,
        ),
        Row(
            "photographs with 2 workers, against PyTorch's DataLoader with Pillow; with simplejpeg and OpenCV",
            "2; 1.2 times as fast", "loader-torch", _loader_torch, True,
        ),
        Row(
            "1,281,167 small files, 2 ranks: time to the first step; memory of the host beyond that for 1,000 files",
            "20 s; 200 MB", "many-files", _many_files, True,
        ),
        Row(
            "how long a snapshot of ResNet-50 in the background keeps training",
            "0.1 s", "snapshot-pause", _pause, True,
        ),
        Row(
            "ResNet-50's gradient, 16 images: error against float64, relative to PyTorch's in float32",
            "at most 1.3", "gradient-error", lambda r: f"{r['ratio']:.2f}", True,
        ),
        Row(
            "what a rehearsal predicts of a step, of bytes sent and of memory: measured / predicted",
            "0.75 to 1.25", "rehearsal", _rehearsal, True,
        ),
        Row(
            "what `dbrdist-train` adds to a hand-written loop: ResNet-20 at batch 128; a tiny MLP", "3 %; 30 us",
            "run-cost", _run_cost,
        ),
        Row(
            "round trip of 24 bytes; `split` and `finalize`; `bcast_data` of 100 MB by MPI's time; 2 ranks",
            "15 us; 1 ms; 1.1", "verbs", _verbs, True,
        ),
        Row("cost of `--profile`, in pairs of runs on one rank", "5 %", "profile-cost", _observed, True),
        Row("cost of `--watch` for a run on all cores, in stretches of it", "0.5 %", "watch-cost", _observed, True),
        Row(
            "from installing a wheel to an own network trained on 2 ranks: all commands of "
            "[the tutorial](tutorials/own-images.md)",
            "5 min", "tutorial", _tutorial, True,
        ),
        Row(
            "cost of `--trace`; of an audit of the parameters every 100 steps; ResNet-20 on 2 ranks", "2 %; 1 %",
            "trace-cost", _trace,
        ),
        Row(
            "random configurations that train two steps or end with an error message, without a traceback", "5,000",
            "random-configurations", lambda r: f"{sum(r['endings'].values()) - len(r['faults']):,}",
        ),
    ],
    "Complete training runs": [
        Row("`examples/digits`, 2 ranks", "97 % in 60 s", "digits", _digits),
        Row("`examples/cifar10`, ResNet-20, 10 epochs, images as JPEG, 2 ranks", "85 %", "cifar10", _cifar10),
        Row(
            "`examples/imagenet/sample.yaml`, 240 photographs memorised, 2 ranks", "loss below 0.5",
            "imagenet-sample", _memorised,
        ),
        Row(
            "character LSTM and PTB LSTM with PyTorch's initial values and batches: bits per character, perplexity",
            "within 2 % of PyTorch's", "language-model-char language-model-ptb", _language_models,
        ),
    ],
    "Tests": [
        Row("random mutants of our code that tests notice", "96 %", "mutants-seed101", _mutants),
        Row(
            "mutants aimed at conditions, defaults, constants and errors", "95 %", "mutants-aimed-seed92", _mutants
        ),
        Row("formulas and derivatives made wrong, one at a time", "-", "wrong-formulas", _wrong_formulas),
    ],
}  # fmt: skip

PREFACE = """# Figures

This page lists what was measured, against what and where. A record gives the command, the commit, the versions, the
machine, the repeats and their spread. A ratio is valid for the machine on which it was measured: *Xeon* is 2 cores of
an Intel Xeon with AVX-512 and AMX, *EPYC* 2 cores of an AMD EPYC with AVX-512 and without AMX. The EPYC of 30 November
2026 is faster than those before it: one core multiplies 242 GFLOP of float32 in a second with AVX-512, as oneDNN does,
and 106 in products of PyTorch's, which use AVX2 there; ratios with large products are better than on other processors.
Times are medians of alternating samples, ours first. Rows about networks were measured with compiled modules, the
others interpreted. Goals that were missed are listed too.

This page is written by `python benchmarks/figures.py --write`. The launcher's figures are in [launch.md](launch.md).
"""
HEAD = "| what | goal | measured | on | record |\n|---|---|---|---|---|\n"
DATED = re.compile(r"(.+)-(\d{4}-\d\d-\d\d)(?:-\d+)?\.json")


def newest(kind: str) -> dict[str, tuple[str, Results]]:
    """Of each processor the name and the content of the newest record of a kind."""
    found: dict[str, tuple[str, Results]] = {}
    for path in sorted(RECORDS.glob(f"{kind}-*.json"), key=lambda path: path.stem):
        match = DATED.fullmatch(path.name)
        if match and match[1] == kind:
            record = json.loads(path.read_text())
            found[_machine(record)] = (path.name, record)
    return found


def _machine(record: Results) -> str:
    device = (record.get("versions") or {}).get("device")  # of a GPU
    name = str(device or (record.get("machine") or {}).get("cpu", "any"))
    return next((known for known in ("Xeon", "EPYC", "H100", "H200") if known in name), name)


def lines(row: Row, directory: str) -> list[str]:
    """The row's lines in a table of a page from which ``directory`` leads to the records: one for each processor."""
    kinds = [newest(kind) for kind in row.kinds.split()]
    if not all(kinds):
        if row.is_awaited:
            return []
        raise ValueError(f"no record of {row.kinds!r} in {RECORDS}")
    made = []
    for machine in sorted(kinds[0], key=lambda name: kinds[0][name][0], reverse=True):
        if not all(machine in found for found in kinds):
            continue
        names, records = zip(*(found[machine] for found in kinds))
        said = row.say(*(record.get("results", record) for record in records))
        links = ", ".join(f"[{DATED.fullmatch(name)[2]}]({directory}/{name})" for name in names)  # type: ignore[index]
        what, goal = ("", "") if made else (row.what, row.goal)
        made.append(f"| {what} | {goal} | {said} | {machine} | {links} |\n")
    return made


def page() -> str:
    """docs/figures.md."""
    text = PREFACE
    for title, rows in GROUPS.items():
        made = (line for row in rows for line in lines(row, "../benchmarks/records"))
        text += f"\n## {title}\n\n{HEAD}{''.join(made)}"
    return text


def outdated(files: Sequence[tuple[Path, str]]) -> list[Path]:
    """Those whose text is another."""
    return [path for path, text in files if not path.exists() or path.read_text() != text]


def files() -> list[tuple[Path, str]]:
    """What is written, and what it should say."""
    return [(PAGE, page())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write what has changed")
    args = parser.parse_args()
    changed = outdated(files())
    for path, text in files():
        if path in changed:
            if args.write:
                path.write_text(text)
            print(f"{'wrote' if args.write else 'would change'} {path.relative_to(ROOT)}")
    if changed and not args.write:
        sys.exit(1)


if __name__ == "__main__":
    main()
