"""Options of `dbrdist-train`: what each one passes on, their bounds and defaults, and the codes of mistakes."""

from __future__ import annotations

import sys

import click
import pytest

from dbrdist import __version__
from dbrdist.cli import train
from dbrdist.cli.output.refuse import Refused
from dbrdist.errors import CheckpointError, ConfigError
from tests.each import each


@pytest.fixture
def asked(folder, monkeypatch):
    """`asked("run.yaml", ...)`: the exit code, and what was called with which arguments instead of done."""
    calls = []
    (folder / "run.yaml").write_text("model: mlp\ndata: digits\nbatch: 10\nepochs: 1\n")

    def note(name, result=0):
        return lambda *args, **options: calls.append((name, *args, *options.values())) or result

    monkeypatch.setattr(train, "_run", lambda settings, origin, *rest: calls.append(("run", *rest)) or 0)
    monkeypatch.setattr(train, "_dry_run", lambda settings, origin: calls.append(("dry run",)) or 0)
    monkeypatch.setattr(
        train, "_write_schedule", lambda settings, origin, *rest: calls.append(("schedule", *rest)) or 0
    )
    monkeypatch.setattr(train, "_rehearse", lambda settings, origin, *rest: calls.append(("rehearse", *rest)) or 0)
    monkeypatch.setattr(train.rehearsal, "parse", note("job", "JOB"))
    monkeypatch.setattr(train.rehearsal, "parse_trial", note("trial", "TRIAL"))
    for name in ("write_report", "watch_runs", "audit_run", "predict_images", "export"):
        monkeypatch.setattr(train.commands, name, note(name, ()))

    def call(*words):
        calls.clear()
        monkeypatch.setattr(sys, "argv", ["dbrdist-train", *words])
        return train._main(), [*calls]

    return call


@each(
    **{
        "words, call": [
            ([], ("run", "new", None, False, False)), (["--resume"], ("run", "resume", None, False, False)),
            (["--overwrite"], ("run", "overwrite", None, False, False)),
            (["--trace"], ("run", "new", None, True, False)), (["--profile"], ("run", "new", None, True, True)),
            (["--evaluate", "there"], ("run", "new", "there", False, False)), (["--dry-run"], ("dry run",)),
            (["--schedule", "s.csv", "--examples", "9"], ("schedule", "s.csv", 9)),
            (["--schedule", "s.csv", "--examples", str(2**40)], ("schedule", "s.csv", 2**40)),
        ]
    }
)  # fmt: skip
def test_what_options_ask_for(asked, words, call):
    assert asked("run.yaml", *words) == (0, [call])


def test_a_rehearsal_has_its_numbers(asked):
    words = ["run.yaml", "--rehearse", "8x8", "--examples", "9"]
    end = ("rehearse", "JOB", "TRIAL", 9)
    assert asked(*words) == (0, [("job", "8x8", 100.0, 5.0, None), ("trial", "8x2@64"), end])
    own = ["--gigabits", "25", "--microseconds", "0", "--examples-per-second", "7", "--trial", "2x2@8"]
    assert asked(*words, *own) == (0, [("job", "8x8", 25.0, 0.0, 7.0), ("trial", "2x2@8"), end])


@each(
    **{
        "words, call": [
            (["--report", "a", "b"], ("write_report", ["a", "b"])), (["--watch", "a"], ("watch_runs", ["a"], None)),
            (["--watch", "a", "b", "--port", "1"], ("watch_runs", ["a", "b"], 1)),
            (["--watch", "a", "--port", "65535"], ("watch_runs", ["a"], 65535)),
            (["--audit", "a"], ("audit_run", "a", [])),
            (["--predict", "a", "x.jpg"], ("predict_images", "a", ["x.jpg"])),
            (["--export", "a", "x.onnx"], ("export", "a", ["x.onnx"])),
        ]
    }
)  # fmt: skip
def test_what_is_done_beside_training(asked, words, call):
    assert asked(*words) == (0, [call])


ALONE = "--schedule and --rehearse are used alone"
NO_TRAINING = "--evaluate does not train: it cannot be combined with "
EACH_PAIR = [
    (first, second)
    for first in ("--report", "--watch", "--audit", "--predict", "--export", "--init", "--version", "--check-gpu")
    for second in (
        "--resume",
        "--overwrite",
        "--evaluate",
        "--trace",
        "--profile",
        "--schedule",
        "--rehearse",
        "--dry-run",
    )
]
TAKES = {"--report", "--watch", "--audit", "--predict", "--export", "--init", "--evaluate", "--schedule", "--rehearse"}


@each(
    **{
        "words, message": [
            *[
                ([word for option in pair for word in ((option, "x") if option in TAKES else (option,))],
                 f"{pair[0]} cannot be combined with {pair[1]}")
                for pair in EACH_PAIR
            ],
            (["--watch", "a", "--report", "b"], "--report cannot be combined with --watch"),
            (["--port", "80", "--report", "b"], "--port goes with --watch"),
            (["--watch", "a", "--port", "0"], "0 is not in the range 1<=x<=65535"),
            (["--watch", "a", "--port", "65536"], "65536 is not in the range 1<=x<=65535"),
            ([], "expected a configuration: dbrdist-train CONFIG.yaml [KEY=VALUE]..."),
            (["epochs=1"], "expected a configuration: dbrdist-train CONFIG.yaml [KEY=VALUE]..."),
            *[(["run.yaml", "--evaluate", "x", f"--{name}"], f"{NO_TRAINING}--{name}")
              for name in ("resume", "overwrite", "dry-run", "trace", "profile")],
            (["run.yaml", "--resume", "--overwrite"], "--resume continues the run in the folder, --overwrite moves it"),
            (["run.yaml", "--examples", "9"], "--examples goes with --schedule or --rehearse"),
            (["run.yaml", "--schedule", "s.csv"], "--schedule reads no data: give the number of training examples"),
            (["run.yaml", "--rehearse", "8x8"], "--rehearse reads no data: give the number of training examples"),
            *[(["run.yaml", "--schedule", "s.csv", "--examples", "9", *more], ALONE)
              for more in (["--resume"], ["--dry-run"], ["--overwrite"], ["--trace"], ["--rehearse", "8x8"])],
            *[(["run.yaml", "--rehearse", "8x8", "--examples", "9", *more], "is not in the range")
              for more in (["--gigabits", "0"], ["--microseconds", "-1"], ["--examples-per-second", "0"])],
            (["run.yaml", "--schedule", "s.csv", "--examples", "0"], "0 is not in the range 1<=x<=1099511627776"),
            (["run.yaml", "--schedule", "s.csv", "--examples", str(2**40 + 1)], "not in the range 1<=x<=1099511627776"),
            *[(["run.yaml", "batch={virtual_workers: 2, per_worker: 5}", f"--{name}"],
               f"--{name} does not work with virtual workers; write `batch: N`") for name in ("trace", "profile")],
        ]
    }
)  # fmt: skip
def test_options_that_do_not_go_together(asked, capfd, words, message):
    code, calls = asked(*words)
    err = capfd.readouterr().err
    assert code == 2 and not [call for call in calls if call[0] not in ("job", "trial")], calls
    assert err.startswith("dbrdist-train: ") and message in err and err.count("\n") == 1


@each(
    **{
        "option, entry": [
            ("--batch-size", "batch"), ("--bs", "batch"), ("-b", "batch"), ("--lr", "optimizer.lr"),
            ("--learning-rate", "optimizer.lr"), ("--epoch", "epochs"), ("--output", "out"), ("--output-dir", "out"),
            ("--out_dir", "out"), ("--model-name", "model"), ("--arch", "model"), ("--workers", "workers"),
            ("--num-workers", "workers"), ("--momentum", "optimizer.momentum"), ("--dataset", "data"),
            ("--optim", "optimizer"), ("--seed", "seed"), ("--nonsense", None),
        ]
    }
)  # fmt: skip
def test_an_entry_that_was_written_as_an_option(monkeypatch, option, entry):
    words = (
        "" if entry is None else f" Entries of the configuration are written without dashes, behind its name: {entry}="
    )
    for more, value in ((["5"], "5"), (["--resume"], "..."), ([], "...")):
        monkeypatch.setattr(sys, "argv", ["dbrdist-train", "run.yaml", option, *more])
        assert train._as_entry(option) == (words and words + value)
    monkeypatch.setattr(sys, "argv", ["dbrdist-train", "run.yaml"])
    assert train._as_entry(option) == (words and words + "...")


@each(**{"size, rank, sleeps": [(1, 0, [None]), (4, 0, [None, 0.3]), (4, 2, [5.0, None, 0.3])]})
def test_a_mistake_before_mpi_is_said_by_rank_0_first(size, rank, sleeps):
    """None stands for the words among the seconds."""
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.environment, "launched", lambda: (size, rank, 0))
        patch.setattr(train.time, "sleep", done.append)
        patch.setattr(train, "_complain", lambda words: done.append(None) if words == "no" else done.append(words))
        assert train._refuse_before_mpi("no", 7) == 7
    assert done == sleeps


def test_only_rank_0_prints(run, monkeypatch):
    assert run("--version") == (0, f"dbrdist {__version__}\n", "")
    for words in (["--version"], ["--print-schema"], ["--help"], ["run.yaml", "--dry-run"], ["--init", "digits"]):
        monkeypatch.setattr(train.environment, "launched", lambda: (2, 1, 1))
        assert run(*words) == (0, "", "")
        if words[-1] != "--dry-run":
            monkeypatch.setattr(train.environment, "launched", lambda: (2, 0, 1))
            code, out, _ = run(*words)
            assert code == 0 and out


@each(
    **{
        "error, code, words": [
            (ConfigError("run.yaml:1:1: no"), 2, "run.yaml:1:1: no"), (Refused("no", 5), 5, "no"),
            (CheckpointError("no"), 2, "dbrdist-train: no"), (click.UsageError("no"), 2, "dbrdist-train: no"),
        ]
    }
)  # fmt: skip
def test_codes_of_mistakes(monkeypatch, capfd, error, code, words):
    def fail(arguments, standalone_mode):
        assert not standalone_mode
        raise error

    monkeypatch.setattr(train.command, "main", fail)
    assert train._main() == code and capfd.readouterr().err == f"{words}\n"
    for result, expected in ((None, 0), (0, 0), (75, 75)):
        monkeypatch.setattr(train.command, "main", lambda arguments, standalone_mode, result=result: result)
        assert train._main() == expected
