"""Jobs that run on this machine: where they are found, and what they answer."""

import json
import os
import pathlib
import socket
import stat
import subprocess
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits
from dbrdist_launch.channel import Channel
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.records import jobs
from dbrdist_launch.launcher.records.jobs import JobFolder
from dbrdist_launch.messages import Answer, Ask


def test_a_path_that_the_kernel_takes_gets_a_socket(monkeypatch):
    rest = len("/dbrdist-launch/0123456789ab/socket")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for letter, length, fits in (("x", 107, True), ("x", 108, False), ("é", 106, False)):  # é is two bytes
            runtime = short + "/" + letter * (length - rest - len(short) - 1)
            os.mkdir(runtime)
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
            folder = jobs.JobFolder("n", ["x"], "t")
            assert (folder.socket is not None) == fits
            if folder.socket is not None:
                with socket.socket(socket.AF_UNIX) as one:
                    one.bind(folder.socket)
            folder.close()


def test_ssh_options_with_spaces_become_a_script(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = jobs.JobFolder("n", ["x"], "t")
    path = folder.ssh_with("printf", ("%s|", "-o", "ProxyCommand=ssh -W %h:%p jump"))
    child = subprocess.run([path, "a b"], capture_output=True, text=True)
    assert child.stdout == "-o|ProxyCommand=ssh -W %h:%p jump|a b|"
    folder.close()
    assert list((tmp_path / "dbrdist-launch").iterdir()) == []


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "dbrdist-launch"


def test_a_job_has_a_folder_that_nobody_else_takes_or_deletes(runtime, monkeypatch):
    """Two containers may share it, and have the same process ids."""
    monkeypatch.setattr(jobs, "bases", lambda: [str(runtime)])
    one, other = JobFolder("name", ["a", "b"], "token"), JobFolder("name", ["a", "b"], "other")
    assert one.folder != other.folder and sorted(os.listdir(one.folder)) == ["job.json", "token"]
    content = json.loads(pathlib.Path(one.folder, "job.json").read_text())
    assert content.pop("started") == pytest.approx(time.time(), abs=60)
    assert content == {"job": "name", "pid": os.getpid(), "command": ["a", "b"], "token": "token"}
    assert pathlib.Path(one.folder, "token").read_text() == "token"
    found = {job["token"]: job for job in jobs.running()}
    assert sorted(found) == ["other", "token"] and found["token"]["socket"] == f"{one.folder}/socket"
    one.close()
    assert not os.path.exists(one.folder) and [job["token"] for job in jobs.running()] == ["other"]
    other.close()
    assert jobs.running() == [] and os.listdir(runtime) == []


def test_a_link_to_a_folder_of_ours_is_not_believed(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file").touch(mode=0o600)
    found = {name: jobs.is_ours(str(tmp_path / name)) for name in ("own", "link", "file", "none")}
    assert found == {"own": True, "link": False, "file": False, "none": False}


def test_folders_of_dead_launchers_are_taken_away(runtime, monkeypatch):
    """A launcher that lives holds a lock, whatever its number means here."""
    monkeypatch.setattr(jobs, "bases", lambda: [str(runtime)])
    alive = JobFolder("alive", ["x"], "t")
    for name, text in (("1", '{"pid": 1}'), ("3", "{}"), (".new", "")):
        (runtime / name).mkdir(mode=0o700)
        (runtime / name / "job.json").write_text(text)
    (runtime / "others").mkdir(mode=0o777)
    (runtime / "others").chmod(0o777)
    assert [job["job"] for job in jobs.running()] == ["alive"]
    assert sorted(os.listdir(runtime)) == sorted([".new", "others", os.path.basename(alive.folder)])
    alive.close()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_jobs_in_a_folder_of_somebody_else_are_not_listed(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(jobs, "bases", lambda: [str(tmp_path / "nowhere"), str(tmp_path / "b")])
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o700)
    monkeypatch.setattr(jobs, "base", lambda: str(tmp_path / "b"))
    one = JobFolder("\x1b]0;title\x07", ["x"], "t")
    (tmp_path / "b").chmod(mode)
    assert len(jobs.running()) == (mode == 0o700)
    one.close()
    assert jobs.plain("\x1b]0;a\x07\tb\n\x9b") == "?]0;a?\tb\n?"


def test_jobs_of_every_login_are_looked_for(monkeypatch, tmp_path):
    places = {f"/tmp/dbrdist-launch-{os.getuid()}", f"/run/user/{os.getuid()}/dbrdist-launch"}
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert set(jobs.bases()) == places and jobs.base().startswith("/tmp/")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert set(jobs.bases()) == {*places, f"{tmp_path}/dbrdist-launch"} and jobs.base().startswith(str(tmp_path))


def test_a_job_of_another_login_is_listed(monkeypatch, tmp_path):
    places = [str(tmp_path / name) for name in ("ours", "another")]
    monkeypatch.setattr(jobs, "bases", lambda: places)
    monkeypatch.setattr(jobs, "base", lambda: places[1])
    one = JobFolder("name", ["x"], "t")
    assert [job["job"] for job in jobs.running()] == ["name"]
    one.close()


def test_a_launcher_that_does_not_answer_is_waited_for_so_long_and_no_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "REPLY_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        job = {"socket": str(tmp_path / "s"), "token": "t"}
        assert jobs.ask(job, "state") == "no answer"
    assert jobs.ask(job, "state") == "no answer: Connection refused; the job may be between two attempts"


@pytest.mark.parametrize("pieces", [1, 2, 0])
def test_a_launcher_is_asked_and_its_answer_may_come_in_pieces(tmp_path, pieces):
    path, heard = str(tmp_path / "s"), []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def answer():
            connection, _ = server.accept()
            here, there = socket.socketpair()
            with connection, here, there:
                while not heard:
                    heard.extend(Channel(connection).receive() or [])
                Channel(here).send(Answer("rank 0 läuft\n".encode()))
                raw = there.recv(4096)
                connection.setblocking(True)
                for k in range(pieces):
                    connection.sendall(raw[k * len(raw) // pieces : (k + 1) * len(raw) // pieces])
                    time.sleep(0.02)

        other = threading.Thread(target=answer)
        other.start()
        found = jobs.ask({"socket": path, "token": "t"}, "state")
        other.join(20)
    assert found == ("rank 0 läuft\n" if pieces else "no answer")
    assert heard == [Ask("t", "state")]
    os.unlink(path)
    assert jobs.ask({"socket": path, "token": "t"}, "state").startswith(
        "no answer: No such file or directory; the job may"
    )


def test_a_job_is_found_by_its_name_or_number(monkeypatch):
    found = [{"job": "a", "pid": 7, "id": "x1"}, {"job": "b", "pid": 8, "id": "x2"}]
    monkeypatch.setattr(jobs, "running", lambda: found)
    assert jobs.find("b") is found[1] and jobs.find("7") is found[0] and jobs.find("x2") is found[1]
    found.append({"job": "b", "pid": 9, "id": "x3"})
    with pytest.raises(LaunchError, match=r"^2 running jobs are called 'b'; give a process id or the job.s id: 8"):
        jobs.find("b")
    found.pop()
    with pytest.raises(LaunchError, match=r"^no job 'c' is running on this machine; running jobs: a \(7\), b \(8\)$"):
        jobs.find("c")
    found.clear()
    with pytest.raises(LaunchError, match=r"running jobs: none$"):
        jobs.find("a")


def test_a_job_is_described_with_its_ranks(monkeypatch):
    monkeypatch.setattr(jobs, "time", SimpleNamespace(time=lambda: 107.4))
    monkeypatch.setattr(jobs, "ask", lambda job, what: f"{what}\nmore")
    job = {"job": "a", "pid": 7, "id": "x1", "command": ["python", "x" * 200], "started": 100.0}
    assert jobs.describe(job) == f"a  pid 7  id x1  7 s  python {'x' * 93}\n  state\n  more"
    del job["started"]
    assert jobs.describe(job).startswith("a  pid 7  id x1  0 s  ")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o701, 0o704])
def test_a_folder_that_others_may_enter_is_not_used(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert jobs.base() == f"{tmp_path}/dbrdist-launch"
    (tmp_path / "dbrdist-launch").mkdir()
    (tmp_path / "dbrdist-launch").chmod(mode)
    one = JobFolder("a", ["x"], "t")
    assert (one.folder is not None) == (one.socket is not None) == (mode == 0o700)
    if one.folder is not None:
        path = one.ssh_with("my ssh", ("-o", "a b"))
        with open(path) as file:
            assert file.read() == "#!/bin/sh\nexec 'my ssh' -o 'a b' \"$@\"\n"
        assert [stat.S_IMODE(os.stat(p).st_mode) for p in (path, one.folder)] == [0o700, 0o700]
    else:
        with pytest.raises(LaunchError, match="--ssh-option with spaces needs a folder for a script"):
            one.ssh_with("ssh", ())
    one.close()
    assert os.listdir(tmp_path / "dbrdist-launch") == []


@pytest.mark.parametrize("runtime", [None, "", "/nowhere"])
def test_without_a_runtime_folder_that_of_the_user_is_taken(monkeypatch, runtime):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert jobs.base() == f"/tmp/dbrdist-launch-{os.getuid()}"
