"""Metrics for Prometheus."""

import re
import socket
import threading
import urllib.request

import pytest
from clocks import Clock
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.records.metrics import Metrics
from dbrdist_launch.messages import Exit


def read(metrics, path="/metrics", host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{metrics.port}{path}", timeout=20) as answer:
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


def test_the_page_of_metrics_line_by_line(monkeypatch):
    clock = Clock(monkeypatch)
    metrics = Metrics("0", "job")
    try:
        busy = Rank(1, "b", channel=None, step=7, count=2, beat_at=1001.5, fields={"loss": 0.5})
        busy.take_output("out", b"12345")
        over = Rank(0, "a", channel=None, exit=Exit(code=0, signal=0))
        metrics.ranks, metrics.size, metrics.restarts = {1: busy, 0: over}, 4, 3
        clock.now += 2.0
        lines = metrics.text().splitlines()
    finally:
        metrics.close()
    rows = [
        ("ranks", "gauge", "ranks of the job", {'job_name="job"': 4.0}),
        ("ranks_running", "gauge", "ranks that run", {'job_name="job"': 1.0}),
        ("restarts_total", "counter", "restarts of the job so far", {'job_name="job"': 3.0}),
        ("uptime_seconds", "gauge", "age of the job", {'job_name="job"': 2.0}),
        ("rank_running", "gauge", "1 while the rank runs", {"0": 0.0, "1": 1.0}),
        ("rank_step", "gauge", "step of the last heartbeat", {"1": 7.0}),
        ("rank_heartbeats", "gauge", "heartbeats that were seen", {"0": 0.0, "1": 2.0}),
        ("rank_heartbeat_age_seconds", "gauge", "seconds since the last heartbeat", {"1": 0.5}),
        ("rank_output_bytes_total", "counter", "bytes that the rank has written", {"0": 0.0, "1": 5.0}),
    ]
    ranks = {"0": 'job_name="job",rank="0",host="a"', "1": 'job_name="job",rank="1",host="b"'}
    expected = []
    for name, kind, words, values in rows:
        full = f"dbrdist_launch_{name}"
        expected += [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
        expected += [f"{full}{{{ranks.get(label, label)}}} {value}" for label, value in values.items()]
    assert lines[: len(expected)] == expected
    assert lines[len(expected) + 2 :] == [f'dbrdist_launch_rank_field{{{ranks["1"]},field="loss"}} 0.5']


def test_numbers_that_are_not_finite_are_written_as_the_format_has_them():
    metrics = Metrics("0", "job")
    try:
        values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e300, "e": 10**400, "f": -(10**400)}
        metrics.ranks = {0: Rank(0, "vm", channel=None, fields=values)}
        text = read(metrics)
    finally:
        metrics.close()
    assert re.findall(r'rank_field\{.*field="(.)"\} (.+)', text) == [
        ("a", "NaN"),
        ("b", "+Inf"),
        ("c", "-Inf"),
        ("d", "1e+300"),
        ("e", "+Inf"),
        ("f", "-Inf"),
    ]


@pytest.mark.parametrize(
    "place", ["", "x", "70000", "1.2.3.4", "²", "[::1]", "[2001:db8::1]:0", f"{'x' * 70}.a:0", "a..b:0"]
)
def test_a_place_that_cannot_be_listened_at_is_refused(place):
    with pytest.raises(LaunchError, match="--metrics"):
        Metrics(place, "job")


@pytest.mark.parametrize("place", ["[::1]:0", "::1:0", "localhost:0", "127.0.0.1:0", ":0"])
def test_every_form_of_an_address_is_listened_at(place):
    if "::1" in place:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    metrics = Metrics(place, "job")
    try:
        assert "dbrdist_launch_ranks{" in read(metrics, host="[::1]" if "::1" in place else "127.0.0.1")
    finally:
        metrics.close()


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_word_in_the_job_s_output(capfd):
    metrics = Metrics("0", "job")
    try:
        handled = threading.Event()
        plain = metrics.server.handle_error
        metrics.server.handle_error = lambda *given: (plain(*given), handled.set())
        metrics.text = lambda: "x" * (1 << 26)  # more than connections take
        with socket.create_connection(("127.0.0.1", metrics.port)) as reader:
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert reader.recv(10) == b"HTTP/1.0 2"
        assert handled.wait(20)
    finally:
        metrics.close()
    assert capfd.readouterr() == ("", "")


def test_the_first_step_has_the_number_0(monkeypatch):
    metrics = Metrics("0", "job")
    try:
        metrics.ranks = {0: Rank(0, "a", channel=None, step=0), 1: Rank(1, "a", channel=None, step=-1)}
        text = metrics.text()
    finally:
        metrics.close()
    assert re.findall(r'rank_step\{.*rank="(.)".*\} (.+)', text) == [("0", "0.0")]


@pytest.mark.parametrize("place", ["x", "", "host:", "65536", "-1", "1.5", "host:65536"])
def test_a_place_without_a_port_is_refused(place):
    with pytest.raises(LaunchError, match=f"--metrics {place!r}: expected a port such as 9400, or an address and a"):
        Metrics(place, "job")


def test_a_reader_that_stays_does_not_hold_the_launcher_up():
    metrics = Metrics("0", "job")
    try:
        assert metrics.server.daemon_threads and metrics.server.address_family == socket.AF_INET
    finally:
        metrics.close()


def test_the_answer_of_the_server(monkeypatch):
    metrics = Metrics("0", "job")
    monkeypatch.setattr(metrics, "text", lambda: "é 1\n")
    try:
        for path, code, body in (
            ("/metrics", 200, b"\xc3\xa9 1\n"),
            ("/metrics?x=1", 200, b"\xc3\xa9 1\n"),
            ("/", 404, b""),
        ):
            with socket.create_connection(("127.0.0.1", metrics.port), timeout=20) as there:
                there.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                head, _, found = there.makefile("rb").read().partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            assert first.split()[1] == str(code) and found == body
            assert lines[-2:] == [
                "Content-Type: text/plain; version=0.0.4; charset=utf-8",
                f"Content-Length: {len(body)}",
            ]
    finally:
        metrics.close()
