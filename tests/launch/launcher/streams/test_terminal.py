"""Whose terminal the launcher stands on."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from dbrdist_launch.launcher.streams.terminal import echoes, in_foreground, is_free, is_terminal
from processes import in_child

# Python warns of forks beside threads, as those of the test runner; what is forked here calls the kernel alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

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


def test_a_terminal_of_our_own_session_may_be_read_in_the_foreground():
    def act():
        os.setsid()
        _main, terminal = pty.openpty()
        os.dup2(terminal, 0)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        ours = (is_terminal(), in_foreground(), is_free(), echoes())
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        other = os.fork()
        if not other:
            os.setpgid(0, 0)
            os.tcsetpgrp(0, os.getpid())
            os._exit(0)
        os.waitpid(other, 0)
        given = (in_foreground(), is_free())
        silent = termios.tcgetattr(0)
        silent[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, silent)
        hidden = echoes()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        gone = (is_terminal(), in_foreground(), is_free(), echoes())
        found = (ours, given, hidden, gone)
        return 7 if found == ((True, True, False, True), (False, False), False, (False,) * 4) else 8

    assert in_child(act) == 7
