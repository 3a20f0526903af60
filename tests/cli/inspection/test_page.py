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


def test_a_picture_may_have_each_letter_of_base64():
    letters = "".join(map(chr, range(33, 127)))
    of_base64 = "".join(c for c in letters if c.isalnum() or c in "+/=")
    assert len(of_base64) == 65
    for picture, is_shown in ((of_base64, True), *((c, c in of_base64) for c in letters), ("", True), (b"AA", False)):
        assert bool(page._example({"image": picture, "label": 1, "likeliest": []}, None)) is is_shown


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


def test_the_whole_table_of_ranks():
    run = with_ranks(
        {"data_wait_fraction": 0.256, "memory_bytes": 1_234_567_890, "step": 1000},
        {"communication_fraction": 0.1, "host": "<n2>", "time": 970.0, "device_memory_bytes": 2_500_000_000},
        {"seconds_per_step": None, "communication_fraction": None, "host": None, "time": 970.99, "step": 999},
        {"ended": True, "seconds_per_step": 1.5, "communication_fraction": 2.0},
    )

    def row(rank, host, kind, words, *figures):
        cells = "".join(f'<td class="figure">{text}</td>' for text in figures)
        rest = f'<td>{host}</td><td class="state {kind}">{words}</td>{cells}</tr>'
        return f'<tr><td class="figure">{rank}</td>{rest}'

    heads = ["rank", "host", "state", "step", "step time", "waiting for data", "communicating", "memory", "GPU memory"]
    late = "no step for 0:31: evaluating, saving, waiting or stopped, slowest, behind"
    rows = (
        row(0, "n1", "", "running", "1,000", "100.0 ms", "26 %", "50 %", "1.23 GB", ""),
        row(1, "&lt;n2&gt;", "problem", late, "10", "100.0 ms", "", "10 %", "", "2.50 GB"),
        row(2, "", "", "running, behind", "999", "", "", "", "", ""),
        row(3, "n1", "", "ended, behind", "10", "1,500.0 ms", "", "200 %", "", ""),
    )
    words = "<p>The slowest is rank 1 on &lt;n2&gt;: 90.0 ms of its own in each step, 80 % more than the median.</p>"
    titles = "".join(f"<th>{head}</th>" for head in heads)
    table = f'<div class="scroll"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'
    assert page._ranks([run], now=1000.99) == f"<h2>Ranks</h2>{words}{table}"
    ended = with_ranks({"ended": True}, {}, status="finished")
    assert re.findall('"state (.*?)">(.*?)<', page._ranks([ended], None)) == [
        ("finished", "ended, slowest"), ("failed", "did not end by itself"),
    ]  # fmt: skip
    assert re.findall('"state (.*?)">(.*?)<', page._ranks([with_ranks({"time": 0.0})], None)) == [("", "running")]
    assert re.findall('"state (.*?)">(.*?)<', page._ranks([with_ranks({"time": 970.0})], 1000.0)) == [("", "running")]


@each(
    **{
        "shares, words": [
            ([0.5, 0.5, 0.4976], "rank 2 on n1: 50.2 ms of its own in each step.<"),  # 0.48 % more
            ([0.5, 0.5, 0.497], "rank 2 on n1: 50.3 ms of its own in each step, 1 % more than the median.<"),
            ([1.0, 1.0, 0.5], "rank 2 on n1: 50.0 ms of its own in each step.<"),
            ([-1.0, 0.5, 0.5], "rank 0 on n1: 100.0 ms of its own in each step, 100 % more than the median.<"),
        ]
    }
)
def test_how_much_slower_the_slowest_rank_is(shares, words):
    assert words in page._ranks([with_ranks(*[{"communication_fraction": share} for share in shares])], 1000.0)


@each(num=[32, 33, 34])
def test_of_many_ranks_those_are_shown_that_lag_or_take_longest(num):
    run = with_ranks(*[{"step": 9 if k == 20 else 10, "seconds_per_step": 0.1 + 0.001 * k} for k in range(num)])
    text = page._ranks([run], 1000.0)
    shown = [int(rank) for rank in re.findall(r'<tr><td class="figure">(\d+)<', text)]
    assert shown == (list(range(32)) if num == 32 else [20, *[k for k in reversed(range(num)) if k != 20][:31]])
    rest = f'<p class="soft">and {num - 32} other ranks, which are further or faster</p>'
    assert (rest in text) == (num > 32) == ("other ranks" in text)


def test_configurations_that_are_none_are_shown_by_lines():
    first = record("a", [])
    found = page._configurations([first._replace(config="- 1\n- 2"), first._replace(config="- 1\n- 3")])
    assert re.findall("<th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>", found.partition("</tr>")[2]) == [
        ("line 2", "- 2", "- 3")
    ]
    many = [first._replace(config="".join(f"k{i}: {v}\n" for i in range(501))) for v in (1, 2)]
    assert page._configurations(many).count("<tr><th>k") == 500
    limit = 1 << 17  # letters of a configuration that is read; of a longer one the lines are compared
    for more, key in ((0, "x"), (1, "line 1")):
        long = [first._replace(config=f"x: {letter * (limit - 3 + more)}") for letter in "ab"]
        assert f"<tr><th>{key}</th>" in page._configurations(long)


def test_progress_of_several_runs():
    first = with_ranks({"epoch": 31.0, "num_epochs": 30.0, "step": 1234})
    ended = with_ranks({"epoch": 1.0, "num_epochs": 30.0}, status="finished")
    text = page._progress([first, ended, first._replace(name="<b>")])
    bar = '<progress max="1" value="1.0000" aria-label="progress"></progress>'
    lines = [f"<div>{name}: epoch 31.00 of 30, step 1,234<br>{bar}</div>" for name in ("a", "&lt;b&gt;")]
    assert text == "".join(lines)


def test_the_title_names_up_to_three_runs():
    runs = [record(name, []) for name in ("a", "<b>", "c", "d")]
    assert [page.title_of(runs[:k]) for k in (1, 2, 3, 4)] == ["a", "a and <b>", "a and <b> and c", "4 runs"]
