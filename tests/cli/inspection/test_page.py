"""Tests of dbrdist.cli.inspection.page."""

from __future__ import annotations

import re

import pytest

from dbrdist.cli.inspection import chart, curves, page
from tests.cli.inspection.records_helpers import record
from tests.each import each

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
BOMB = "x0: &x0 [1, 2]\n" + "".join(f"x{k}: &x{k} [*x{k - 1}, *x{k - 1}]\n" for k in range(1, 40))


@each(
    case=[
        (None, ""), (True, "True"), (12345, "12,345"), (999.94, "999.9"), (1000.0, "1,000"), (-999.9, "-999.9"),
        (-1234.5, "-1,234"), (0.123456, "0.1235"), ({"a": 1, "b": 2}, "a 1, b 2"), ("x", "x"),
    ]
)  # fmt: skip
def test_cells_of_a_report(case):
    assert page._shown(case[0]) == case[1]


def test_what_stands_at_the_head_of_a_page():
    log = [{"epoch": 1, "validation/main/accuracy": 0.51236, "validation/main/loss": 1.23456, "main/loss": 0.5}]
    first, second = record("<a>", log), record("b", [], status="failed")
    words = ", test accuracy 51.24 %, test loss 1.235, training loss 0.5"
    assert page._headline([first]) == f'<div><b class="finished">finished</b>{words}</div>'
    lines = [f'<span class="swatch" style="background:{chart.colour(k)}"></span>' for k in range(2)]
    assert page._headline([first, second]) == (
        f'<div>{lines[0]}&lt;a&gt;: <b class="finished">finished</b>{words}</div>'
        f'<div>{lines[1]}b: <b class="failed">failed</b></div>'
    )
    assert page._headline([record("b", [], status="<running>")]) == '<div><b class="">&lt;running&gt;</b></div>'


@each(num=[1, 2, 3, 4, 12])
def test_parts_of_many_runs_are_folded_behind_what_differs(num):
    log = [{"epoch_detail": e, "main/loss": 1.0, "validation/main/loss": 2.0} for e in (1.0, 2.0)]
    runs = [record(f"r{k}", log)._replace(messages=["words"], config=f"seed: {k}\n") for k in range(num)]
    text = page.render(runs)
    assert text.count("<details open>") == (num if 1 < num <= 3 else 0)
    assert text.count("<details>") == (num if num > 3 else 0)
    assert "<h2>Messages</h2>" in text if num == 1 else "<summary><h2>Messages of r1</h2></summary>" in text
    assert text.count('id="configurations"') == 1
    assert (text.index('id="configurations"') < text.index('id="ranks"')) == (num > 1)
    names = [key.name for key in curves.legend(runs, next(curves.curves(runs))[2]) or ()]
    assert names == ([] if num == 1 else [f"r{k}" for k in range(num if num <= 3 else 0)] + ["training", "test"])


def test_facts_are_shown_where_any_run_has_them():
    first, second = record("<a>", [], seed=0, iterations=1200, epochs=0, commit=""), record("b", [], reason="<stop>")
    assert page._facts([first]) == (
        "<table><tr><th>status</th><td>finished</td></tr><tr><th>steps</th><td>1,200</td></tr>"
        "<tr><th>seed</th><td>0</td></tr></table>"
    )
    assert page._facts([first, second]) == (
        "<table><tr><th></th><th>&lt;a&gt;</th><th>b</th></tr>"
        "<tr><th>status</th><td>finished</td><td>finished</td></tr>"
        "<tr><th>reason</th><td></td><td>&lt;stop&gt;</td></tr><tr><th>steps</th><td>1,200</td><td></td></tr>"
        "<tr><th>seed</th><td>0</td><td></td></tr></table>"
    )


def test_the_entries_in_which_configurations_differ():
    first, second = record("a", []), record("<b>", [])
    assert page._configurations([first]) == "<h2>Configuration</h2><pre>epochs: 3\nout: a\n</pre>"
    title = "<h2>Differences of the configurations</h2>"
    names = "<tr><th></th><th>a</th><th>&lt;b&gt;</th></tr>"
    assert page._configurations([first, second]) == (
        f'{title}<div class="scroll"><table>{names}<tr><th>out</th><td>a</td><td>&lt;b&gt;</td></tr></table></div>'
    )
    assert page._configurations([first, first]) == f"{title}<p>The configurations are the same.</p>"
    nested = first._replace(config="epochs: 3\nout: a\noptimizer:\n  hooks: [{rate: 0.1}]\n  nesterov: true\n")
    found = page._configurations([first, nested])
    assert re.findall("<th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>", found.partition("</tr>")[2]) == [
        ("optimizer.hooks.0.rate", "", "0.1"),
        ("optimizer.nesterov", "", "true"),
    ]


@pytest.mark.slow
@each(config=[BOMB, "a: &a [*a]", "[" * 5000, "a: [", "\0", "a: 1\na: 2", "- 1\n- 2", "x" * 200_000, ""])
def test_configurations_that_are_none_are_compared_by_lines(config):
    first = record("a", [])
    found = page._configurations([first, first._replace(config=config)])
    assert found.startswith("<h2>Differences") and len(found) < 1_000_000


STATE = {"host": "n1", "step": 10, "time": 1000.0, "seconds_per_step": 0.1, "communication_fraction": 0.5}


def with_ranks(*states, status="running"):
    ranks = [{**STATE, **state, "rank": rank} for rank, state in enumerate(states)]
    return record("a", [], status=status)._replace(ranks=ranks)


def test_the_slowest_rank_is_the_one_that_waits_least_for_others():
    run = with_ranks({"host": "n1"}, {"host": "n2", "communication_fraction": 0.1}, {"host": "n3"})
    text = page._ranks([run], now=1001.0)
    assert "The slowest is rank 1 on n2: 90.0 ms of its own in each step, 80 % more than the median." in text
    assert re.findall('<td class="state ">(.*?)</td>', text) == ["running", "running, slowest", "running"]
    assert "slowest" not in page._ranks([with_ranks({})], 1001.0)
    assert "slowest" not in page._ranks([with_ranks({"seconds_per_step": None}, {"seconds_per_step": "x"})], 1001.0)


def test_ranks_that_lag_behind_or_are_silent_are_said():
    run = with_ranks({}, {"step": 8, "time": 900.0})
    text = page._ranks([run], now=1001.0)
    assert "no step for 1:41: evaluating, saving, waiting or stopped" in text and "behind" in text
    assert "did not end by itself" in page._ranks([with_ranks({}, {}, status="failed")], 1001.0)
    died = with_ranks({"ended": True, "error": "OutOfMemory: <x>"}, status="failed")
    assert "ended: OutOfMemory: &lt;x&gt;" in page._ranks([died], 1001.0)
    many = with_ranks(*[{"step": 10 - (k == 77)} for k in range(1000)])
    text = page._ranks([many], now=1001.0)
    assert text.count("<tr>") == 33 and "and 968 other ranks" in text
    assert re.search(r'<tr><td class="figure">77</td>', text)


def test_progress_of_a_run_that_continues():
    run = with_ranks({"epoch": 7.5, "num_epochs": 30.0, "examples_per_second": 1531.2, "seconds_left": 75.0})
    text = page.sections([run], now=1001.0)["progress"]
    assert "epoch 7.50 of 30, step 10, 1,531 examples/s, 1:15 left" in text and 'value="0.2500"' in text
    assert page.sections([run])["progress"] == ""
    assert page.sections([with_ranks({"epoch": "x", "num_epochs": 0})], now=1001.0)["progress"] == ""


def test_hostile_texts_are_escaped_everywhere():
    one = {"image": "AAAA", "label": 0, "likeliest": [[0, 0.9], [5, 0.1], ["<x>", 0.0]]}
    run = record(HOSTILE, [{"epoch": 1, HOSTILE: 1.0, "main/loss": 2.0}, {"epoch": 2, HOSTILE: 2.0}], reason=HOSTILE)
    shown = {"classes": [HOSTILE], "first": [one], "worst": [{**one, "image": '"><script>'}, 3, {}], "epoch": 1.0}
    ranks = [{**STATE, "host": HOSTILE, "rank": 0, "step": HOSTILE, "error": HOSTILE}, {**STATE, "rank": 1}]
    texts = {"config": f"a: '{HOSTILE}'", "messages": [HOSTILE], "problems": [HOSTILE]}
    run = run._replace(examples=shown, ranks=ranks, **texts)
    for runs in ([run], [run, run._replace(name="other", config="b: <script>")]):
        text = page.render(runs)
        assert "<script" not in text and "<img src=x" not in text and "<x>" not in text
        assert "&lt;script&gt;alert(1)" in text and 'src="data:image/png;base64,AAAA"' in text


BROKEN_GUESSES = {"image": "AA", "label": [], "likeliest": [1, [2], [1, "x"], [1, 2, 3]]}


@each(
    **{
        "examples, num_shown": [
            ({}, 0),
            ({"first": 3}, 0),
            ({"first": [1, None, "x", []]}, 0),
            ({"worst": [{"image": 1}]}, 0),
            ({"first": [{"image": "AA", "label": 1}]}, 0),  # nothing is said of it
            ({"first": [BROKEN_GUESSES], "classes": 5, "epoch": "x"}, 1),
        ]
    }
)
def test_examples_of_any_shape_are_shown_as_far_as_they_go(examples, num_shown):
    text = page._examples([record("a", [])._replace(examples=examples)])
    assert text.count("<img") == num_shown and bool(text) == bool(num_shown)


def test_names_of_classes_and_predictions():
    one = {"image": "AA==", "label": 1, "likeliest": [[0, 0.75], [1, 0.25]]}
    text = page._examples([record("a", [])._replace(examples={"classes": ["cat", "dog"], "worst": [one], "epoch": 3})])
    assert "<h2>Worst mistakes</h2>" in text and "after epoch 3" in text and "Predictions" not in text
    assert '<b>dog</b><br><span class="wrong">cat 75.0 %</span><br><span class="soft">dog 25.0 %</span>' in text
