"""Tests of dbrdist.cli.output.warned."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import dbrdist
from dbrdist.cli.output.console import Console
from dbrdist.cli.output.warned import Warned, in_words
from dbrdist.comm import run_threads
from tests.cli.cli_helpers import OWN_MODULE


def test_a_thousand_warnings_are_told_apart():
    said = []
    warned = Warned(0, SimpleNamespace(warn=said.append))
    with warned.listening(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned._take
        for number in [*range(1001), 0]:
            warnings.warn(f"odd {number}", stacklevel=1)
    assert len(said) == 1000 and said[-1].startswith("odd 999 (UserWarning at ")


@pytest.fixture
def own_module(folder):
    (folder / "ends_own.py").write_text(OWN_MODULE)
    return folder


def test_a_run_says_a_warning_once_in_a_line_and_keeps_it(run, own_module):
    words = ["extensions=[{name: 'ends_own:warns', args: {}}]", "iterations=4"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("run.yaml", *words)
    assert code == 0, err
    line = next(k for k, text in enumerate(OWN_MODULE.splitlines(), 1) if "warnings.warn(" in text)
    said = f"warning: the cache is cold and slow (RuntimeWarning at ends_own.py:{line})"
    assert [text for text in err.splitlines() if "cold" in text] == [said]
    assert [text[21:] for text in Path("result/log.txt").read_text().splitlines() if "cold" in text] == [said]
    assert "cold" not in out


def test_warnings_before_the_folder_is_taken_are_in_its_log(run, own_module):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("run.yaml", "model={name: 'ends_own:net_that_warns'}")[0] == 0
    written = [text[21:] for text in Path("result/log.txt").read_text().splitlines()]
    assert written[0].startswith("dbrdist-train ") or "dbrdist-train" in written[0]
    assert sum("made of old parts" in text for text in written) == 1


def test_warnings_of_other_ranks_alone_are_said_at_the_end(capsys):
    found = {}

    def main(comm):
        warned = found[comm.rank] = Warned(comm.rank, Console())
        for words in ["all were told", *(["alone"] if comm.rank else [])]:
            for _ in range(2):
                warned._take(UserWarning(words), UserWarning, dbrdist.__file__, 1)
        warned.gather(comm)

    run_threads(3, main)
    assert capsys.readouterr().err == "warning: all were told\nwarning: rank 1: alone\n"


def test_a_rank_whose_run_fails_says_its_own_warnings(capsys):
    def main(comm):
        warned = Warned(comm.rank, Console())
        warned._take(UserWarning(f"of rank {comm.rank}"), UserWarning, dbrdist.__file__, 1)
        warned.say_own()

    run_threads(2, main)
    lines = sorted(capsys.readouterr().err.splitlines())
    assert lines == ["warning: of rank 0", "warning: rank 1: of rank 1"]


def test_warnings_that_nobody_can_read_or_place_stop_nothing(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert in_words("odd", FutureWarning, "/else/where.py", 3) == "odd (FutureWarning at /else/where.py:3)"
    assert in_words("odd", FutureWarning, "where.py", 3) == "odd (FutureWarning at where.py:3)"
    monkeypatch.setattr(sys, "stderr", None)  # as in `2>&-`
    Console().warn("odd")
