"""Divided data, shared evaluation and agreed stops, on ranks that are threads."""

import os
import signal

import pytest

from dbrdist.comm import create_communicator, extensions, run_threads
from dbrdist.errors import StopRequested
from tests.comm import data_contract


@pytest.mark.parametrize("check", data_contract.CHECKS, ids=data_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_data_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_taken_and_given_back(number):
    before = signal.getsignal(number)
    stop = extensions.StopOnRequest(create_communicator("single"))
    stop.initialize(None)
    os.kill(os.getpid(), number)
    with pytest.raises(StopRequested, match=f"{number.name} arrived on rank 0; all ranks stopped after step 4$"):
        stop(data_contract.FakeTrainer)
    stop.finalize()
    assert signal.getsignal(number) is before
