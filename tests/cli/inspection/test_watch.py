"""Tests of dbrdist.cli.inspection.watch: the answers, the servers, and the page in a browser."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbrdist.cli.inspection import watch
from dbrdist.cli.output.lock import Lock
from dbrdist.errors import ConfigError
from tests.each import each

TOKEN = "secret-token"
CHROMIUM = "/usr/bin/chromium"


def make_run(place, num_lines=50, name="run", **state):
    """The folder of a run that continues, as if this process trained it."""
    folder = place / name
    (folder / "ranks").mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "num_ranks": 2}))
    (folder / "config.yaml").write_text(f"epochs: 30\nout: {folder}\n")
    (folder / "log.txt").write_text("2026-01-01 00:00:00  it began\n")
    lines = ({"epoch_detail": k / 10, "main/loss": 1 / (1 + k) + (k == num_lines // 3)} for k in range(num_lines))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in (0, 1):
        known = {
            "host": "n1",
            "step": 5,
            "epoch": 5.0,
            "num_epochs": 30.0,
            "time": time.time(),
            "seconds_per_step": 0.1,
        }
        (folder / "ranks" / f"{rank}.json").write_text(
            json.dumps({**known, "communication_fraction": rank / 2, **state})
        )
    return str(folder)


def ask(application, path=f"/{TOKEN}/", host="127.0.0.1:8040", method="GET", query=""):
    """Status, headers and body of an answer."""
    told = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "HTTP_HOST": host}
    body = b"".join(application(environ, lambda status, headers: told.append((status, dict(headers)))))
    assert int(told[0][1]["Content-Length"]) == len(body) or method == "HEAD"
    return int(told[0][0][:3]), told[0][1], body.decode()


@pytest.fixture
def held(tmp_path):
    """A run that continues."""
    path = make_run(tmp_path)
    lock = Lock(os.path.join(path, "run.lock"))
    lock.acquire()
    yield path
    lock.release()


def test_the_page_shows_the_run_and_loads_nothing_from_elsewhere(held):
    status, headers, text = ask(watch.Dashboard([held], TOKEN))
    assert status == 200 and "epoch 5.00 of 30" in text and "it began" in text
    assert "The slowest is rank 0 on n1: 100.0 ms of its own in each step, 33 % more than the median." in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy


@pytest.mark.slow
@each(
    case=[
        ({"path": "/"}, 403), ({"path": "/wrong/"}, 403), ({"path": ""}, 403), ({"path": f"/{TOKEN[:-1]}/"}, 403),
        ({"path": f"/{TOKEN}"}, 404), ({"path": f"/{TOKEN}/../log.jsonl"}, 404), ({"path": f"/{TOKEN}/log.jsonl"}, 404),
        ({"path": f"/{TOKEN}//etc/passwd"}, 404), ({"path": f"/{TOKEN}/watch.py"}, 404), ({"path": "/\udc80/"}, 403),
        ({"path": "x"}, 403), ({"path": TOKEN}, 403),
        ({"host": "evil.example"}, 403), ({"host": "evil.example:8040"}, 403), ({"host": ""}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403), ({"host": "127.0.0.1:8040@evil.example"}, 403),
        ({"method": "POST"}, 405), ({"method": "PUT"}, 405), ({"method": "DELETE"}, 405), ({"method": "OPTIONS"}, 405),
        ({"host": "localhost:9999"}, 200), ({"host": "LOCALHOST"}, 200), ({"host": "[::1]:80"}, 200),
        ({"method": "HEAD"}, 200),
        ({"path": f"/{TOKEN}/watch.js"}, 200), ({"path": f"/{TOKEN}/state", "query": "known=" + "x," * 9999}, 200),
        ({"path": f"/{TOKEN}/chart", "query": "name=loss&from=nan&to=x"}, 200),
        ({"path": f"/{TOKEN}/chart", "query": "name=%00&from=1e999"}, 200), ({"path": f"/{TOKEN}/chart"}, 200),
    ]
)  # fmt: skip
def test_who_is_answered(case, tmp_path_factory):
    asked, expected = case
    path = make_run(tmp_path_factory.mktemp("runs"))
    assert ask(watch.Dashboard([path], TOKEN), **asked)[0] == expected


def test_tokens_are_long_and_differ(tmp_path):
    tokens = {watch.Dashboard([str(tmp_path)]).token for _ in range(20)}
    assert len(tokens) == 20 and all(len(token) >= 20 for token in tokens)


def test_only_what_changed_is_sent_again(held, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_SECONDS", -1.0)
    application = watch.Dashboard([held], TOKEN)
    state = json.loads(ask(application, f"/{TOKEN}/state")[2])
    assert {"headline", "progress", "ranks", "messages", "facts", "configurations"} <= set(state["sections"])
    marks = [one["mark"] for one in state["sections"].values()] + [state.get("charts", {}).get("mark", "")]
    again = json.loads(ask(application, f"/{TOKEN}/state", query=f"known={','.join(marks)}")[2])
    assert again["sections"] == {} and "charts" not in again
    with open(os.path.join(held, "log.txt"), "a") as file:
        file.write("and went on\n")
    again = json.loads(ask(application, f"/{TOKEN}/state", query=f"known={','.join(marks)}")[2])
    assert list(again["sections"]) == ["messages"] and "and went on" in again["sections"]["messages"]["html"]


def test_a_run_that_is_removed_is_a_sentence_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_SECONDS", -1.0)
    paths = [make_run(tmp_path, name=name) for name in ("a", "b")]
    application = watch.Dashboard(paths, TOKEN)
    assert ask(application)[0] == 200
    shutil.rmtree(paths[0])
    status, _, text = ask(application)
    assert status == 200 and f"{paths[0]}: the folder was removed" in text and "gone" in text and "1/2" not in text
    assert json.loads(ask(application, f"/{TOKEN}/state")[2])["title"] == "a and b"


def test_an_answer_that_fails_is_a_sentence_and_the_next_one_comes(held, monkeypatch):
    application = watch.Dashboard([held], TOKEN)
    monkeypatch.setattr(watch.page, "sections", lambda *args, **options: 1 / 0)
    status, _, text = ask(application)
    assert (status, text) == (500, "dbrdist-train --watch: ZeroDivisionError: division by zero")
    monkeypatch.undo()
    assert ask(application)[0] == 200


@pytest.mark.slow
def test_charts_have_the_extremes_and_names_that_are_no_html(tmp_path):
    path = make_run(tmp_path, 3000, name="<b>run")
    chart = json.loads(ask(watch.Dashboard([path], TOKEN), f"/{TOKEN}/chart", query="name=loss")[2])["chart"]
    (line,) = chart["lines"]
    assert len(line["x"]) <= 1002 and max(line["y"]) == pytest.approx(1 + 1 / 1001) and line["y"][0] == 1.0
    whole = json.loads(ask(watch.Dashboard([path], TOKEN), f"/{TOKEN}/chart", query="name=loss&from=99&to=101")[2])
    assert whole["chart"]["lines"][0]["x"] == pytest.approx([k / 10 for k in range(989, 1012)])
    other = make_run(tmp_path, name="other")
    chart = json.loads(ask(watch.Dashboard([path, other], TOKEN), f"/{TOKEN}/chart", query="name=loss")[2])["chart"]
    assert [line["legend"] for line in chart["lines"]] == ["&lt;b&gt;run", "other"]
    many = [make_run(tmp_path, name=f"r{k} \"&'") for k in range(4)]
    chart = json.loads(ask(watch.Dashboard(many, TOKEN), f"/{TOKEN}/chart", query="name=loss")[2])["chart"]
    assert [line["legend"] for line in chart["lines"]] == [""] * 4  # the list of runs has their colours
    assert chart["lines"][0]["name"].startswith("r0 \"&amp;'")


def test_a_port_in_use_is_a_sentence_and_without_one_a_free_one_is_found():
    with socket.socket() as taken:
        taken.bind((watch.HOST, 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {number} is in use; give another with --port N"):
            watch.listen(number)
    first, second = watch.listen(None), watch.listen(None)
    assert first.getsockname() != second.getsockname() and second.getsockname()[0] == "127.0.0.1"
    first.close()
    second.close()


def test_ctrl_c_is_the_end_with_every_server(tmp_path, monkeypatch):
    def interrupted(application, listening):
        def serve():
            raise KeyboardInterrupt

        return serve

    monkeypatch.setattr(watch, "server_of", interrupted)
    words, *_ = watch.watch([str(tmp_path)], None)
    assert words.startswith(f"watching {tmp_path}: http://127.0.0.1:")


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: expected the folder of a run, there is no such folder"):
        list(watch.watch([str(tmp_path), str(tmp_path / "nowhere")], None))


@pytest.fixture(params=["waitress", "own"])
def served(request, held, monkeypatch):
    """The port of a server, by waitress or by Python's own."""
    if request.param == "waitress":
        pytest.importorskip("waitress", reason="waitress is not installed: pip install dbrdist[watch]")
    else:
        found = importlib.util.find_spec
        monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None if name == "waitress" else found(name))
    listening = watch.listen(None)
    run = watch.server_of(watch.Dashboard([held], TOKEN), listening)
    assert type(run.__self__).__module__.startswith("waitress") is (request.param == "waitress")
    threading.Thread(target=run, daemon=True).start()
    return listening.getsockname()[1]


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_many_pages_that_ask_at_once_are_no_warning(served, caplog):
    with caplog.at_level("WARNING", logger="waitress"):
        asked = [socket.create_connection(("127.0.0.1", served), timeout=10) for _ in range(30)]
        for one in asked:
            one.sendall(f"GET /{TOKEN}/state HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        for one in asked:
            assert b" 200 " in one.makefile("rb").readline()
            one.close()
    assert not caplog.records


def test_a_server_answers_many_at_once_and_outlives_those_who_go_away(served):
    assert get(served, f"/{TOKEN}/")[0] == 200 and get(served, "/")[0] == 403
    assert get(served, f"/{TOKEN}/", Host="evil.example")[0] == 403
    for rude in (b"", b"\x00\xff\r\n\r\n", b"GET", b"GET / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served), timeout=10) as one:
            one.sendall(rude)
    slow = [socket.create_connection(("127.0.0.1", served), timeout=10) for _ in range(8)]  # they never ask
    assert get(served, f"/{TOKEN}/state")[0] == 200
    for one in slow:
        one.close()


def seconds_of_this_process():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_100_000_points_are_quick_after_they_were_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_SECONDS", -1.0)
    application = watch.Dashboard([make_run(tmp_path, 100_000)], TOKEN)
    ask(application, f"/{TOKEN}/chart", query="name=loss")
    before = seconds_of_this_process()
    for _ in range(10):
        _, _, text = ask(application, f"/{TOKEN}/state")
    assert (seconds_of_this_process() - before) / 10 < 0.2 and len(text) < 200_000


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with api.sync_playwright() as made:
        started = made.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def library(request, monkeypatch):
    """With plotly, or as if it were not installed."""
    if not request.param:
        monkeypatch.setattr(watch, "_plotly_script", lambda: None)
    elif watch._plotly_script() is None:
        pytest.skip("plotly is not installed: pip install dbrdist[watch]")
    return request.param


def until(page, condition):
    """Wait until a condition holds in the page, whose policy keeps the browser from doing so."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"it never held: {condition}")


@pytest.mark.programs
@pytest.mark.parametrize("library", [True, False], indirect=True, ids=["plotly", "pictures"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(browser, library, scheme, width, held, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_SECONDS", 0.0)
    hostile = "<img src=x onerror=window.broken=1>"
    with open(os.path.join(held, "log.jsonl"), "a") as file:
        file.write(json.dumps({"epoch_detail": 6.0, "main/loss": 0.5, f"main/{hostile}": 1.0}) + "\n")
    listening = watch.listen(None)
    threading.Thread(target=watch.server_of(watch.Dashboard([held], TOKEN), listening), daemon=True).start()
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}/")
    page.wait_for_selector(".plot .scatterlayer .trace" if library else ".charts svg")
    with open(os.path.join(held, "log.txt"), "a") as file:
        file.write(f"new words {hostile}\n")
    until(page, "document.querySelector('#messages').textContent.includes('new words')")
    assert page.evaluate("window.broken") is None and hostile in page.inner_text("#charts")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    ink, paper = (sum(map(float, c[c.index("(") + 1 : -1].split(",")[:3])) for c in colours)
    assert (ink > paper) == (scheme == "dark")
    favourites = [words for words in complaints if "favicon" not in words and "404" not in words]
    assert not favourites
    shutil.rmtree(held)
    until(page, "document.querySelector('#headline').textContent.includes('the folder was removed')")
    page.close()


@pytest.mark.programs
@pytest.mark.parametrize("library", [True], indirect=True, ids=["plotly"])
def test_zooming_shows_every_point_and_stays_zoomed(browser, library, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_FRESH_SECONDS", 0.0)
    path = make_run(tmp_path, 100_000)
    listening = watch.listen(None)
    threading.Thread(target=watch.server_of(watch.Dashboard([path], TOKEN), listening), daemon=True).start()
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}/")
    page.wait_for_selector(".plot .scatterlayer .trace")
    assert page.evaluate("document.querySelector('.plot').data[0].x.length") <= 1002
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range[0]': 100, 'xaxis.range[1]': 110})")
    until(page, "document.querySelector('.plot').data[0].x.length === 103")
    with open(os.path.join(path, "log.jsonl"), "a") as file:
        file.write('{"epoch_detail": 105.05, "main/loss": 7}\n')
    until(page, "document.querySelector('.plot').data[0].x.length === 105")
    assert page.evaluate("document.querySelector('.plot').layout.xaxis.range") == [100, 110]
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.autorange': true})")
    until(page, "document.querySelector('.plot').data[0].x.length > 500")
    page.close()


@pytest.mark.programs
def test_the_ranks_of_a_run_load_no_server():
    """A megabyte for each rank, and OpenSSL."""
    words = "import sys, dbrdist.cli.train; print([m for m in ('wsgiref', 'http.server', 'ssl') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_library_for_charts_is_there_or_not(held, tmp_path):
    """A day may pass before a browser asks for it again."""
    board = watch.Dashboard([held], TOKEN)
    (tmp_path / "plotly.min.js").write_text("library()")
    for script, status, text in ((None, 404, "there is no such page"), (tmp_path / "plotly.min.js", 200, "library()")):
        board._plotly = script
        found, headers, body = ask(board, path=f"/{TOKEN}/plotly.js")
        assert found == status and text in body and board.has_library == (script is not None)
        page = ask(board)[2]
        assert ('<script src="plotly.js" defer></script>' in page) == (script is not None)
    assert headers["Cache-Control"] == "private, max-age=86400"
    assert headers["Content-Type"] == "text/javascript; charset=utf-8"


def test_charts_are_pictures_or_numbers(held):
    """With the library the page gets what it draws, once; without it the pictures are a section."""
    board = watch.Dashboard([held], TOKEN)
    for script in (None, Path("plotly.js")):
        board._plotly = script
        told = json.loads(ask(board, path=f"/{TOKEN}/state")[2])
        assert ("charts" in told) == (script is not None) and ("charts" in told["sections"]) == (script is None)
    assert told["charts"]["list"]
    marks = [part["mark"] for part in told["sections"].values()] + [told["charts"]["mark"]]
    again = json.loads(ask(board, path=f"/{TOKEN}/state", query="known=" + ",".join(marks))[2])
    assert "charts" not in again and "configurations" not in again["sections"]


@each(case=["not installed", "one file", "no folder", "without the script", "second folder"])
def test_where_the_library_for_charts_is_looked_for(case, tmp_path, monkeypatch):
    folders = {"not installed": None, "one file": None, "no folder": [], "without the script": [str(tmp_path / "none")],
               "second folder": [str(tmp_path / "none"), str(tmp_path / case)]}[case]  # fmt: skip
    script = tmp_path / case / "package_data" / "plotly.min.js"
    script.parent.mkdir(parents=True)
    script.write_text("library()")
    found = None if case == "not installed" else SimpleNamespace(submodule_search_locations=folders)
    with monkeypatch.context() as patch:
        patch.setattr(watch.importlib.util, "find_spec", {"plotly": found}.__getitem__)
        assert watch._plotly_script() == (script if case == "second folder" else None)
