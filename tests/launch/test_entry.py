"""Standard files that were closed are opened again."""

import os
import sys

import pytest
from dbrdist_launch import entry
from processes import in_child

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("name", ["train", "data"])
def test_each_program_runs_its_own_module(name, monkeypatch):
    ran = []
    monkeypatch.setattr(entry, "_run", lambda program, module: ran.append((program, module)))
    getattr(entry, name)()
    assert ran == [(f"dbrdist-{name}", f"dbrdist.cli.{name}")]


def test_closed_standard_files_are_opened_again():
    def act():
        for number in (0, 1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
        entry._raw.clear()
        entry.protect_streams()
        null = os.stat(os.devnull)
        are_open = all(os.path.samestat(os.fstat(number), null) for number in (0, 1, 2))
        return 7 if are_open and (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2) else 8

    assert in_child(act) == 7
