"""Which signals are requests, and which are passed on: by their names, as the manual has them."""

import signal

from dbrdist_launch.signals import PASSED_ON, REAL_TIME, STOPS


def test_each_signal_is_a_request_or_passed_on():
    assert [signal.Signals(number).name for number in STOPS] == ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
    names = ["SIGUSR2", "SIGXCPU", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR"]
    assert [signal.Signals(number).name for number in PASSED_ON] == names
    assert REAL_TIME[0] == signal.SIGRTMIN and REAL_TIME[-1] == signal.SIGRTMAX
    assert len(set(REAL_TIME)) == len(REAL_TIME) == signal.SIGRTMAX - signal.SIGRTMIN + 1
