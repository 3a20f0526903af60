"""The process around a supervisor: whatever ends it, nothing is left running."""

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
