"""The process around a supervisor: whatever ends it, nothing is left running."""

import os
import signal
from types import SimpleNamespace

import pytest
from clocks import Channel as Kept
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.rank import outer
from dbrdist_launch.rank.supervisor import Supervisor
from processes import in_child

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (ConnectionError("refused"), 71, "rank 3: refused\n"),
        (RuntimeError("no rank"), 71, "rank 3: no rank\n"), (ValueError("odd"), 71, "rank 3: ValueError('odd')\n"),
        (KeyboardInterrupt(), 71, "rank 3: KeyboardInterrupt()\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("connected", [False, True])
def test_whatever_ends_a_supervisor_nothing_is_left_running(monkeypatch, capfd, error, code, said, connected):
    happened = []

    def run(self):
        happened.append((self.lifeline, self.backend, self.address))
        self.loop.close()
        self.connected, self.channel = connected, Kept()
        self.channel.unsent = b""
        happened.append(self.channel)
        if error is not None:
            raise error
        return 5

    monkeypatch.setattr(Supervisor, "run", run)
    monkeypatch.setattr(outer.os, "setsid", lambda: happened.append("session"))
    monkeypatch.setattr(outer.linux, "end_descendants", lambda: happened.append("ended"))
    monkeypatch.setenv("PMI_RANK", "3")
    assert outer._inner("hydra", "unix:/s", 99, Inherited()) == code
    session, called, channel, ended = happened
    assert (session, called, ended) == ("session", (99, "hydra", "unix:/s"), "ended")
    told = [fields["message"] for kind, fields in channel.sent if kind == "failed"]
    expected = said.removeprefix("rank 3: ").rstrip()
    assert told == ([expected] if connected and said else [])
    assert capfd.readouterr().err == ("" if connected or not said else f"dbrdist-launch: {said}")


@pytest.mark.parametrize("arguments", [[], ["hydra"]])
def test_a_rank_without_an_address_says_how_it_is_called(capsys, arguments):
    assert in_child(lambda: outer.main(arguments)) == 2


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (9, 137)])
def test_the_outer_process_passes_signals_on_and_waits_for_the_inner_one(monkeypatch, status, code):
    happened, handlers, parents = [], {}, iter([50, 50, 1])
    ended = [(7, 0), (4242, status)]
    read, write = os.pipe()

    def note(name):
        return lambda *words: happened.append((name, *words))

    def wait(*words):
        if len(ended) == 1:  # handlers are called while it waits
            handlers[signal.SIGTERM](signal.SIGTERM, None)
            handlers[outer._ORPHANED](outer._ORPHANED, None)
            assert os.read(read, 9) == b""  # the parent is as before
            handlers[outer._ORPHANED](outer._ORPHANED, None)
            assert os.read(read, 9) == b"o"
        happened.append(("wait", *words))
        return ended.pop(0)

    os.set_blocking(read, False)
    plain = os.read
    monkeypatch.setattr(outer.os, "read", lambda *words: _or_nothing(plain, *words))
    monkeypatch.setattr(outer, "Inherited", lambda: SimpleNamespace(widen=note("widen"), hear=note("hear")))
    monkeypatch.setattr(outer.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(outer.os, "pipe", lambda: (90, write))
    monkeypatch.setattr(outer.os, "close", note("close"))
    monkeypatch.setattr(outer.os, "fork", lambda: 4242)
    monkeypatch.setattr(outer.os, "waitpid", wait)
    monkeypatch.setattr(outer.signal, "signal", handlers.__setitem__)
    for name in ("adopt_orphans", "kill", "die_with_parent", "end_descendants"):
        monkeypatch.setattr(outer.linux, name, note(name))
    assert outer._run("hydra", "unix:/s") == code
    assert set(handlers) == {*outer._FORWARDED, signal.SIGURG}
    assert happened == [
        ("widen",), ("adopt_orphans",), ("close", 90), ("hear", (*outer._FORWARDED, signal.SIGURG)),
        ("die_with_parent", 50, signal.SIGURG), ("wait", -1, 0), ("kill", 4242, signal.SIGTERM), ("wait", -1, 0),
        ("end_descendants",),
    ]  # fmt: skip
    monkeypatch.undo()
    os.close(read)
    outer._tell(write)  # nobody is there any more
    os.close(write)


def _or_nothing(read, *words):
    try:
        return read(*words)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(None, 5, ""), (OSError(24, "Too many open files"), 71, "rank 2: this rank cannot be started: Too many open files "
                     "(OSError(24, 'Too many open files'))\n")],
)  # fmt: skip
def test_a_rank_leaves_with_the_code_of_its_program_or_with_a_sentence(monkeypatch, capfd, error, code, said):
    happened = []

    def run(*words):
        happened.append(words)
        if error is not None:
            raise error
        return 5

    for name in ("PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMIX_RANK", "2")
    monkeypatch.setattr(outer, "restore_environment", lambda: happened.append("environment"))
    monkeypatch.setattr(outer, "_run", run)
    monkeypatch.setattr(outer.os, "_exit", happened.append)
    outer.main(["hydra", "unix:/s", "more"])
    assert happened == ["environment", ("hydra", "unix:/s"), code]
    assert capfd.readouterr().err == (f"dbrdist-launch: {said}" if said else "")
