"""Exit codes: what they mean, and what the help says of them."""

import signal

from dbrdist_launch import codes


def test_names_of_signals():
    assert codes.signal_name(9) == "SIGKILL" and codes.describe_end(3, 0) == "exit code 3"
    assert codes.signal_name(signal.SIGRTMIN + 2) == "SIGRTMIN+2" and codes.signal_name(signal.SIGRTMIN - 1) == (
        f"signal {signal.SIGRTMIN - 1}"
    )
    assert codes.describe_end(0, 15) == "SIGTERM"


def test_wait_statuses_tell_exit_codes_from_signals():
    assert codes.from_wait_status(9 << 8) == (9, 0)
    assert codes.from_wait_status(9) == (137, 9)
    assert codes.signal_name(signal.SIGSEGV) == "SIGSEGV"
    assert codes.signal_name(signal.SIGRTMIN + 2) == "SIGRTMIN+2"


def test_exit_codes_are_those_of_the_help():
    from dbrdist_launch.launcher.cli import _EPILOG

    said = dict(
        part.strip().split(" ", 1)
        for part in _EPILOG.partition("Exit codes: ")[2].partition("; ")[0].replace("\n", " ").split(",")
    )
    assert {int(number): words for number, words in said.items() if number != "128+N"} == {
        codes.DONE: "done", codes.USAGE: "refused", codes.HOST_LOST: "host lost", codes.NOT_STARTED: "could not start",
        codes.PREEMPTED: "stopped on request and saved", codes.STALLED: "stalled or out of time",
        codes.COMMAND_NOT_RUNNABLE: "command not executable", codes.COMMAND_NOT_FOUND: "command not found",
    }  # fmt: skip
    assert codes.from_signal(9) == 137 and codes.LOST_PEER == 14
    numbers = {value for name, value in vars(codes).items() if name.isupper()}
    assert numbers == {0, 2, 14, 69, 71, 75, 124, 126, 127, 213}
