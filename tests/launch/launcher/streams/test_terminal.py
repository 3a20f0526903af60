"""Whose terminal the launcher stands on."""

import os
import pty
import subprocess
import sys

import pytest
from dbrdist_launch.launcher.streams.terminal import in_foreground, is_free, is_terminal

OWNER = """
import os
os.close(os.open(os.ttyname(0), os.O_RDWR))
print("owned", flush=True)
input()
"""


@pytest.mark.programs
def test_a_terminal_of_no_session_is_free_and_that_of_another_is_not():
    """`setsid dbrdist-launch ...` stands on the terminal of a shell, which reads there."""
    main, terminal = pty.openpty()
    kept = os.dup(0)
    os.dup2(terminal, 0)
    try:
        assert is_terminal() and is_free() and not in_foreground()
        with subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=terminal, stdout=subprocess.PIPE, start_new_session=True
        ) as shell:
            shell.stdout.readline()
            assert not is_free() and not in_foreground()
            shell.kill()
        os.dup2(main, 0)  # what another program shows and types there
        assert os.isatty(0) and not is_terminal()
    finally:
        os.dup2(kept, 0)
        for descriptor in (main, terminal, kept):
            os.close(descriptor)
