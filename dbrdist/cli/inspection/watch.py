"""`dbrdist-train --watch`: the page about runs, served on this machine while they continue.

The server only reads: it answers GET and HEAD under an address with a random token, to browsers that asked for
localhost. It is waitress where that is installed, and Python's own otherwise; plotly draws the charts where it is
installed, and otherwise they are the pictures of the report.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import html
import importlib.util
import logging
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from dbrdist.cli.inspection import page
from dbrdist.cli.inspection.chart import Series
from dbrdist.cli.inspection.curves import curves, legend
from dbrdist.cli.inspection.records import RunReader, RunRecord, distinct
from dbrdist.cli.output.words import said
from dbrdist.core.files import strict_json
from dbrdist.errors import ConfigError

HOST, PORT = "127.0.0.1", 8040
_NAMES = {"127.0.0.1", "localhost", "[::1]"}  # under which browsers reach this machine, directly or by a tunnel
_FRESH_SECONDS = 1.0  # how long what was read answers further requests
_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _SECURITY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),  # the address has the token
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_STYLE = """
.plot{height:300px;border:1px solid var(--line);border-radius:6px}#connection{color:var(--bad)}
"""
_SCRIPT = Path(__file__).with_name("watch.js")
_NO_STORE = "no-store"
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class Dashboard:
    """The answers to a browser's questions, as a WSGI application.

    Args:
        paths: folders of runs.
        token: secret part of the address; default: a random one.
    """

    def __init__(self, paths: Sequence[str], token: str | None = None):
        self.token = secrets.token_urlsafe(16) if token is None else token
        self._readers = [RunReader(path) for path in paths]
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._runs: list[RunRecord] = []
        self._plotly = _plotly_script()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            status, kind, text, cache = self._answer(environ)
        except Exception as error:  # one answer fails, the page says so, and the next one may succeed
            status, kind, cache = "500 Internal Server Error", "text/plain; charset=utf-8", _NO_STORE
            text = f"dbrdist-train --watch: {type(error).__name__}: {error}".encode(errors="backslashreplace")
        headers = [("Content-Type", kind), ("Content-Length", str(len(text))), ("Cache-Control", cache), *_HEADERS]
        start_response(status, headers)
        return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else text]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, str, bytes, str]:
        if _host_name(environ.get("HTTP_HOST", "")) not in _NAMES:
            return _refusal("403 Forbidden", "ask for 127.0.0.1 or localhost")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _refusal("405 Method Not Allowed", "this server only answers GET")
        _, _, place = (environ.get("PATH_INFO") or "").partition("/")
        token, *rest = place.split("/", 1)
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return _refusal("403 Forbidden", "use the whole address that dbrdist-train --watch printed")
        words = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=100)
        with self._lock:  # logs grow while they are read
            return self._found(rest[0] if rest else None, {key: values[-1] for key, values in words.items()})

    def _found(self, name: str | None, words: dict[str, str]) -> tuple[str, str, bytes, str]:
        if name == "":
            return "200 OK", "text/html; charset=utf-8", self._page(), _NO_STORE
        if name == "watch.js":
            return "200 OK", "text/javascript; charset=utf-8", _SCRIPT.read_bytes(), _NO_STORE
        if name == "plotly.js" and self._plotly is not None:
            text = self._plotly.read_bytes()
            return "200 OK", "text/javascript; charset=utf-8", text, "private, max-age=86400"
        if name == "state":
            return _as_json(self._state(words.get("known", "")))
        if name == "chart":
            return _as_json(self._chart(words.get("name", ""), _limit(words, "from", -1), _limit(words, "to", 1)))
        return _refusal("404 Not Found", "there is no such page; the address ends with a slash behind the token")

    @property
    def has_library(self) -> bool:
        """Whether charts can be zoomed into."""
        return self._plotly is not None

    # ---- what is told ----

    def runs(self) -> list[RunRecord]:
        """The runs as they are now, or were a moment ago."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            self._runs = distinct([reader.read() for reader in self._readers])
            self._read_at = time.monotonic()
        return self._runs

    def _page(self) -> bytes:
        runs = self.runs()
        library = "" if self._plotly is None else '<script src="plotly.js" defer></script>'
        text = page.head(page.title_of(runs), page.STYLE + _STYLE, html.escape(_SECURITY_OF_META))
        text += '<div id="connection" role="status"></div>'
        text += (
            page.body(page.sections(runs, time.time())) + f'{library}<script src="watch.js" defer></script></html>\n'
        )
        return text.encode(errors="backslashreplace")

    def _state(self, known: str) -> dict[str, Any]:
        """The sections that the page does not have yet: it names those that it has by their marks."""
        runs, has_library = self.runs(), self.has_library
        has, found = set(known.split(",")), {}
        for name, text in page.sections(runs, time.time(), with_charts=not has_library).items():
            mark = _mark(name + text)
            if mark not in has and not (has_library and name == "charts"):
                found[name] = {"mark": mark, "html": text}
        told: dict[str, Any] = {"title": page.title_of(runs), "sections": found}
        if has_library:
            charts = [_as_chart(runs, *one) for one in curves(runs)]
            mark = _mark(strict_json.dumps(charts))
            told |= {} if mark in has else {"charts": {"mark": mark, "list": charts}}
        return told

    def _chart(self, name: str, low: float, high: float) -> dict[str, Any]:
        """A chart between two epochs, with as many points as it has as a whole."""
        runs = self.runs()
        found = next(curves(runs, name, low, high), None)
        return {"chart": None if found is None else _as_chart(runs, *found)}


_SECURITY_OF_META = _SECURITY.replace("frame-ancestors 'none'; ", "")  # which only a header may say


def _as_chart(runs: Sequence[RunRecord], title: str, name: str, series: Sequence[Series]) -> dict[str, Any]:
    """A chart for the script. Plotly takes names for HTML, so they are escaped; it shows quotes as they are."""
    keys = legend(runs, series)
    runs_of = {key.colour: key.name for key in keys or () if key.colour is not None}
    labels: dict[str, str] = {}  # of lines in the legend: each line of one run, one line of each of several
    for one in sorted(series, key=lambda one: one.dashed):
        if one.colour not in labels.values() or keys is None:
            labels[one.name] = one.colour
    is_dashed, has_names = any(one.dashed for one in series), keys is None or runs_of
    return {
        "name": name,
        "title": f"{title} (dashed: training)" if is_dashed else title,
        "lines": [
            {
                "name": html.escape(one.name, quote=False),
                "legend": html.escape(runs_of.get(one.colour, one.name), quote=False)
                if one.name in labels and has_names
                else "",
                "colour": one.colour,
                "dashed": one.dashed,
                "x": [x for x, _ in one.points],
                "y": [y for _, y in one.points],
            }
            for one in series
        ],
    }


def _host_name(host: str) -> str:
    """The name in a Host header, without the port: a tunnel may change it."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and (port.isdecimal() or not port) else host.lower()


def _limit(words: dict[str, str], key: str, side: int) -> float:
    try:
        value = float(words[key])
    except (KeyError, ValueError):
        return side * math.inf
    return side * math.inf if math.isnan(value) else value


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _as_json(data: Any) -> tuple[str, str, bytes, str]:
    return "200 OK", "application/json", strict_json.dumps(data).encode(), _NO_STORE


def _refusal(status: str, words: str) -> tuple[str, str, bytes, str]:
    return status, "text/plain; charset=utf-8", f"{words}\n".encode(), _NO_STORE


def _plotly_script() -> Path | None:
    """The library of charts as the package plotly ships it; the package itself is not imported."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    return None


# ---- servers --------------------------------------------------------------------------------------------------------


def _own_server() -> Any:
    """Python's own server, with a thread for each question, not bound yet; no rank of a run loads its modules."""
    from wsgiref import simple_server

    class Silent(simple_server.WSGIRequestHandler):
        timeout = 60  # seconds for a browser to ask

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Threads(socketserver.ThreadingMixIn, simple_server.WSGIServer):
        daemon_threads = True

        def server_bind(self) -> None:
            raise AssertionError("the socket is bound already")

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that went away is no error."""

    return Threads((HOST, 0), Silent, bind_and_activate=False)


def listen(port: int | None) -> socket.socket:
    """A socket of this machine alone, at `port`, or at the usual one or a free one.

    Raises:
        ConfigError: the given port is in use, or must not be used.
    """
    for number in (PORT, 0) if port is None else (port,):
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((HOST, number))
            found.listen(64)
            return found
        except OSError as error:
            found.close()
            if port is not None:
                reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
                raise ConfigError(
                    f"dbrdist-train: port {port} {reason}; give another with --port N, or leave --port out"
                ) from None
    raise ConfigError(f"dbrdist-train: no port of {HOST} can be used")


def server_of(application: Dashboard, listening: socket.socket) -> Callable[[], None]:
    """A function that answers questions until an exception ends it: by waitress, or by Python's own server."""
    if importlib.util.find_spec("waitress") is not None:
        waitress = importlib.import_module("waitress")
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # several pages that ask at once are no trouble
        server = waitress.create_server(application, sockets=[listening], threads=4, ident=None)
        return server.run
    own = _own_server()
    own.socket.close()
    own.socket = listening
    own.server_address = listening.getsockname()
    own.server_name, own.server_port = HOST, listening.getsockname()[1]
    own.setup_environ()
    own.set_app(application)
    return own.serve_forever


def watch(paths: Sequence[str], port: int | None) -> Iterator[str]:
    """Serve the page about the runs in these folders until Ctrl-C; the first line is its address."""
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{path}: expected the folder of a run, there is no such folder")
    application = Dashboard(paths)
    listening = listen(port)
    number = listening.getsockname()[1]
    yield f"watching {', '.join(paths)}: http://{HOST}:{number}/{application.token}/"
    yield f"from another machine: ssh -L {number}:{HOST}:{number} {socket.gethostname()}; Ctrl-C ends it, and no run"
    if not application.has_library:
        yield "charts are pictures; for charts to zoom into: pip install dbrdist[watch]"
    try:
        server_of(application, listening)()
    except KeyboardInterrupt:  # waitress takes it for an end; it is one for Python's own server too
        pass
    except OSError as error:
        raise ConfigError(f"dbrdist-train: the server ended: {said(error)}") from error
    finally:
        listening.close()
