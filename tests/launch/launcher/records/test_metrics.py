"""Metrics for Prometheus."""

import re
import urllib.request

import pytest
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.records.metrics import Metrics


def read(metrics, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=20) as answer:
        return answer.read().decode()


def test_metrics_are_served_in_prometheus_format():
    metrics = Metrics("0", 'a"\\\n')
    try:
        rank = Rank(3, "vm", channel=None, step=7, count=2, beat_at=1.0, fields={"loss": 0.5, "words": "x", "total": 9})
        rank.take_output("out", b"12345")
        metrics.ranks, metrics.size, metrics.restarts = {3: rank}, 4, 2
        text = read(metrics)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(metrics, "/")
    finally:
        metrics.close()
    labels = r'job_name="a\\"\\\\\?",rank="3",host="vm"'
    for pattern in (
        r'dbrdist_launch_ranks\{job_name="a\\"\\\\\?"\} 4.0', rf"dbrdist_launch_rank_step\{{{labels}\}} 7.0",
        rf"dbrdist_launch_rank_output_bytes_total\{{{labels}\}} 5.0", rf'_rank_field\{{{labels},field="loss"\}} 0.5',
        r"dbrdist_launch_restarts_total\{.*\} 2.0", rf"dbrdist_launch_rank_running\{{{labels}\}} 1.0",
    ):  # fmt: skip
        assert re.search(f"(?m){pattern}$", text), text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) dbrdist_launch_\w+ .+|dbrdist_launch_\w+\{[^\n]*\} [\d.e+-]+", line), line
    assert 'field="words"' not in text


def test_numbers_that_are_not_finite_are_written_as_the_format_has_them():
    metrics = Metrics("0", "job")
    try:
        values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e300}
        metrics.ranks = {0: Rank(0, "vm", channel=None, fields=values)}
        text = read(metrics)
    finally:
        metrics.close()
    assert re.findall(r'rank_field\{.*field="(.)"\} (.+)', text) == [
        ("a", "NaN"),
        ("b", "+Inf"),
        ("c", "-Inf"),
        ("d", "1e+300"),
    ]


@pytest.mark.parametrize("place", ["", "x", "70000", "1.2.3.4", "²"])
def test_a_place_that_cannot_be_listened_at_is_refused(place):
    with pytest.raises(LaunchError, match="--metrics"):
        Metrics(place, "job")
