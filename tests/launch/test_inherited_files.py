"""What a process was started with, told to the functions that look for it: open files, signals, the locale."""

import io
import os
import resource
import signal

import pytest
from dbrdist_launch import inherited
from dbrdist_launch.inherited import Inherited

NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture
def limit(monkeypatch):
    """Makes the limits of open files those given; (what was set, whether setting fails)."""
    asked = []

    def make(soft, hard, error=None):
        def set_limit(kind, values):
            assert kind == resource.RLIMIT_NOFILE
            if error is not None:
                raise error
            asked.append(values)

        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", set_limit)
        return asked

    return make


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (1024, 4096, 4096), (1024, 65535, 65535), (1024, 65536, 65536), (1024, 65537, 65536), (1024, NO_LIMIT, 65536),
        (65536, NO_LIMIT, None), (65537, 1 << 20, None), (4096, 4096, None), (NO_LIMIT, NO_LIMIT, None),
    ],
)  # fmt: skip
def test_a_launcher_opens_as_many_files_as_may_be(limit, soft, hard, most):
    asked = limit(soft, hard)
    one = Inherited()
    one.widen()
    assert asked == ([(most, hard)] if most else []) and one.raised == ([soft, most] if most else [])
    assert one.files == (soft, hard)


@pytest.mark.parametrize("error", [OSError(), ValueError()])
def test_a_limit_that_cannot_be_raised_stays(limit, error):
    limit(1024, 4096, error)
    one = Inherited()
    one.widen()
    assert one.raised == []


def test_the_limit_that_the_launcher_raised_is_taken_back_where_it_came_through(limit):
    limit(4096, 8192)
    one = Inherited()
    for raised, files in (([], (4096, 8192)), ([1024, 2048], (4096, 8192)), ([1024, 4096], (1024, 8192))):
        one.was_raised(raised)
        assert one.files == files


@pytest.mark.parametrize("chosen", ["C.UTF-8", "C.utf8", "UTF-8", "de_DE.UTF-8", None])
@pytest.mark.parametrize("given", [None, b"C", b"", b"xx=yy", OSError()])
def test_the_locale_is_again_as_it_was_given(monkeypatch, chosen, given):
    def read(path, mode):
        assert (path, mode) == ("/proc/self/environ", "rb")
        if isinstance(given, OSError):
            raise given
        return io.BytesIO(b"A=1\0" + (b"" if given is None else b"LC_CTYPE=" + given + b"\0") + b"XLC_CTYPE=2\0")

    monkeypatch.setattr(inherited, "open", read, raising=False)
    if chosen is None:
        monkeypatch.delenv("LC_CTYPE", raising=False)
    else:
        monkeypatch.setenv("LC_CTYPE", chosen)
    inherited.restore_environment()
    is_left = chosen in ("de_DE.UTF-8", None) or isinstance(given, OSError)
    assert os.environ.get("LC_CTYPE") == (chosen if is_left else None if given is None else given.decode())


@pytest.mark.parametrize(
    ("ignores", "is_python", "was_ignored"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_signal_that_python_ignores_was_ignored_where_another_program_handed_that_on(
    monkeypatch, limit, ignores, is_python, was_ignored
):
    asked, handed, masks = [], [], []
    set_limits = limit(1024, 4096)
    monkeypatch.setattr(inherited.os, "getppid", lambda: 50)
    monkeypatch.setattr(inherited.linux, "ignores", lambda pid, number: asked.append((pid, number)) or ignores)
    monkeypatch.setattr(inherited.linux, "is_python", lambda pid: pid == 50 and is_python)
    monkeypatch.setattr(inherited.signal, "signal", lambda *words: handed.append(words))
    monkeypatch.setattr(inherited.signal, "pthread_sigmask", lambda *words: masks.append(words) or {7})
    one = Inherited()
    assert one.ignores_size is was_ignored and asked == [(50, signal.SIGXFSZ)] and one.blocked == {7}
    one.hear((1, 2))
    one.hand_on()
    one.hand_on(files=False)
    size = (signal.SIGXFSZ, signal.SIG_IGN if was_ignored else signal.SIG_DFL)
    assert handed == [(signal.SIGPIPE, signal.SIG_DFL), size] * 2 and set_limits == [(1024, 4096)]
    assert masks == [
        (signal.SIG_BLOCK, ()), (signal.SIG_UNBLOCK, (1, 2)), (signal.SIG_SETMASK, {7}), (signal.SIG_SETMASK, {7}),
    ]  # fmt: skip
