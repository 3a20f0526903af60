"""The launcher ends with the code of its job."""

import sys

import pytest
from dbrdist_launch import main as mains


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 5, ""), (KeyboardInterrupt(), 130, ""),
        (ValueError("odd"), 71, "dbrdist-launch: internal error: ValueError('odd')"),
    ],
)  # fmt: skip
def test_the_launcher_ends_with_the_code_of_its_job(monkeypatch, capsys, error, code, said):
    from dbrdist_launch.launcher import cli

    def run(arguments):
        assert arguments == ["a", "b"]
        if error is not None:
            raise error
        return 5

    happened = []
    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(mains.entry, "protect_streams", lambda: happened.append("streams"))
    monkeypatch.setattr(mains, "restore_environment", lambda: happened.append("environment"))
    monkeypatch.setattr(mains.entry, "say_what_was_lost", happened.append)
    for given in (["a", "b"], None):
        monkeypatch.setattr(sys, "argv", ["dbrdist-launch", "a", "b"])
        with pytest.raises(SystemExit) as caught:
            mains.main(given)
        assert caught.value.code == code
        assert happened == ["streams", "environment", "dbrdist-launch"]
        happened.clear()
        assert capsys.readouterr().err.partition(" at ")[0] == said
