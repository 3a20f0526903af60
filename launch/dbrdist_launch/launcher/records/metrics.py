"""What the ranks do, for Prometheus: `--metrics PORT` serves http://127.0.0.1:PORT/metrics."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ...errors import LaunchError
from ...wire import whole
from ..judgement.ranks import Rank

_CLOSE_SECONDS = 0.1  # at most, until the server sees that it is to end
_OF_RANKS: tuple[tuple[str, str, Callable[[Rank, float], float | None]], ...] = (
    ("running", "1 while the rank runs", lambda rank, now: float(rank.running)),
    ("step", "step of the last heartbeat", lambda rank, now: float(rank.step) if rank.step >= 0 else None),
    ("heartbeats", "heartbeats that were seen", lambda rank, now: float(rank.count)),
    (
        "heartbeat_age_seconds", "seconds since the last heartbeat",
        lambda rank, now: now - rank.beat_at if rank.beat_at is not None else None,
    ),
    ("output_bytes_total", "bytes that the rank has written", lambda rank, now: float(rank.written)),
)  # fmt: skip


class Metrics:
    """A server in threads of its own; it reads what the launcher knows and changes nothing."""

    def __init__(self, place: str, job: str) -> None:
        host, _, port = place.rpartition(":")
        number = whole(port)
        if number is None or number > 65535:
            raise LaunchError(f"--metrics {place!r}: expected a port such as 9400, or an address and a port")
        self.job, self.restarts, self.started_at = job, 0, time.monotonic()
        self.ranks: dict[int, Rank] = {}
        self.size = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                text = self.text().encode() if handler.path.partition("?")[0] == "/metrics" else b""
                handler.send_response(200 if text else 404)
                handler.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *arguments: object) -> None:
                pass  # the job's output is not the place

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(server, request: object, client_address: object) -> None:
                """A reader that went away is no error, and the job's output is not the place."""

        try:
            self.server = Server((host.strip("[]") or "127.0.0.1", number), Handler)
        except (OSError, UnicodeError) as error:  # the latter for what is no name of a host
            reason = getattr(error, "strerror", None) or error
            raise LaunchError(f"--metrics {place!r}: cannot listen there: {reason}") from error
        threading.Thread(target=self.server.serve_forever, args=(_CLOSE_SECONDS,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def text(self) -> str:
        """All metrics, in Prometheus' format."""
        now, ranks = time.monotonic(), sorted(self.ranks.values(), key=lambda rank: rank.rank)
        job = f'job_name="{_escaped(self.job)}"'
        lines = _metric("ranks", "gauge", "ranks of the job", [(job, float(self.size))])
        lines += _metric("ranks_running", "gauge", "ranks that run", [(job, float(sum(r.running for r in ranks)))])
        lines += _metric("restarts_total", "counter", "restarts of the job so far", [(job, float(self.restarts))])
        lines += _metric("uptime_seconds", "gauge", "age of the job", [(job, now - self.started_at)])
        for name, words, value in _OF_RANKS:
            rows = [(_labels(job, rank), found) for rank in ranks if (found := value(rank, now)) is not None]
            lines += _metric(f"rank_{name}", "counter" if name.endswith("_total") else "gauge", words, rows)
        fields = [
            (f'{_labels(job, rank)},field="{_escaped(str(name))}"', _as_float(found))
            for rank in ranks
            for name, found in dict(rank.fields).items()
            if isinstance(found, (int, float))
        ]
        lines += _metric("rank_field", "gauge", "fields of the last heartbeat", fields)
        return "\n".join([*lines, ""])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _labels(job: str, rank: Rank) -> str:
    return f'{job},rank="{rank.rank}",host="{_escaped(rank.host)}"'


def _escaped(text: str) -> str:
    return re.sub(r"[\x00-\x1f\ud800-\udfff]", "?", text.replace("\\", "\\\\").replace('"', '\\"'))


def _metric(name: str, kind: str, words: str, rows: list[tuple[str, float]]) -> list[str]:
    full = f"dbrdist_launch_{name}"
    return [
        f"# HELP {full} {words}",
        f"# TYPE {full} {kind}",
        *(f"{full}{{{labels}}} {_value(v)}" for labels, v in rows),
    ]


def _as_float(value: float) -> float:
    """A number as a double; infinite where it is a larger integer."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _value(value: float) -> str:
    """A number as Prometheus' format writes it."""
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
