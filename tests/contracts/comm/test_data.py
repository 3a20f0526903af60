"""Divided data, shared evaluation and agreed stops, on ranks that are threads."""

import os
import signal

import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.run import extensions
from dbrdist.errors import StopRequested
from tests.comm import data_contract


@pytest.mark.parametrize("check", data_contract.CHECKS, ids=data_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_data_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU])
def test_signals_are_taken_and_given_back(number, monkeypatch):
    monkeypatch.setenv("DBRDIST_LAUNCH", "1")  # which passes a Ctrl-C on to the ranks
    outside = signal.getsignal(number)
    if number in (signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)  # the tests may run below nohup
    before = signal.getsignal(number)
    stop = extensions.StopOnRequest(create_communicator("single"))
    try:
        stop.initialize(None)
        stop.initialize(None)  # as a run does, before its trainer
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested, match=f"{number.name} arrived on rank 0; all ranks stopped after step 4$"):
            stop(data_contract.FakeTrainer)
        stop.finalize()
        assert signal.getsignal(number) is before
    finally:
        stop.finalize()
        signal.signal(number, outside)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_program_that_ignores_or_handles_a_closed_terminal_goes_on(number, handler):
    """As below nohup."""
    before = signal.signal(number, handler)
    try:
        stop = extensions.StopOnRequest(create_communicator("single"))
        stop.initialize(None)
        os.kill(os.getpid(), number)
        stop(data_contract.FakeTrainer)
        stop.finalize()
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_an_interrupt_stays_the_users_own_without_the_launcher(monkeypatch):
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
    before = signal.getsignal(signal.SIGINT)
    stop = extensions.StopOnRequest(create_communicator("single"))
    stop.initialize(None)
    assert signal.getsignal(signal.SIGINT) is before
    stop.finalize()
