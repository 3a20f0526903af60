"""Tests of dbrdist.comm.communicators.create."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import comm
from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.communicators import create
from dbrdist.comm.protocol import settings
from dbrdist.errors import CommunicatorError


def test_create_says_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown communicator 'flatt', .*did you mean 'flat'"):
        create_communicator("flatt")
    with pytest.raises(ValueError, match=r"known are auto, naive, .*did you mean 'two_dimensional'"):
        create_communicator("two-dimensional")
    with pytest.raises(ValueError, match="does not use MPI"):
        create_communicator("single", mpi_comm=3)
    with pytest.raises(ValueError, match=r"unknown configuration 'alreduce_grad_dtype'.*did you mean"):
        create_communicator("single", alreduce_grad_dtype="float16")


def test_without_a_launcher_a_single_rank_is_taken(capfd, monkeypatch):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dbrdist.comm.transport.mpi.started", lambda: None)
    comm = create_communicator(batched_copy=False)
    assert comm.size == 1
    assert comm.get_config("batched_copy") is False
    assert capfd.readouterr().err == "dbrdist: communicator 'single', 1 rank (no launcher started this process)\n"


def test_settings_of_a_communicator_are_single_values_of_known_names():
    own = comm.create_communicator("single")
    with pytest.raises(TypeError, match=r"set_config\('allreduce_grad_dtype'\) expected one value, got also other"):
        own.set_config("allreduce_grad_dtype", None, other=1)
    with pytest.raises(ValueError, match="allreduce_grad_dtype expected a float type, got int32"):
        own.set_config("allreduce_grad_dtype", "int32")
    own.set_config("allreduce_grad_dtype", "float16")
    assert own.get_config("allreduce_grad_dtype") == np.float16 == own.get_config()["allreduce_grad_dtype"]
    own.set_config("allreduce_grad_dtype", None)
    assert own.get_config("allreduce_grad_dtype") is None


@pytest.mark.slow
def test_create_inside_a_thread_rank():
    def body(comm):
        given = create_communicator("threads", allreduce_grad_dtype="float16", batched_copy=True)
        kept = comm.get_config("allreduce_grad_dtype") == np.float16 and comm.get_config("batched_copy") is True
        return given is comm and kept, create_communicator() is comm

    assert run_threads(2, body) == [(True, True)] * 2
    with pytest.raises(ValueError, match="created inside"):
        create_communicator("threads")


@pytest.mark.parametrize("name", ["overlap", "shared_memory", "sockets"])
def test_switches_are_true_false_or_left_to_the_communicator(name):
    """Any word would count as True."""
    switches = settings.Configured({name: None})
    for value in (True, False, None, np.bool_(False), 1, 0):
        switches.set_config(name, value)
        assert switches.get_config(name) is value
    for value in ("no", "maybe", 2, 0.5, [], np.zeros(3)):
        with pytest.raises(ValueError, match=f"{name} expected True, False or None, got"):
            switches.set_config(name, value)


@pytest.mark.parametrize(
    ("mpi_comm", "is_launched", "is_helper", "is_thread", "tells"),
    [
        (None, True, False, False, True), (None, True, True, False, False), (None, False, False, False, False),
        (None, True, False, True, False), ("mine", False, False, True, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("answer", [None, ImportError("no MPI"), CommunicatorError("alone"), ValueError("of all")])
def test_an_error_of_one_rank_is_told_to_those_that_wait(
    monkeypatch, mpi_comm, is_launched, is_helper, is_thread, tells, answer
):
    asked, own = [], ValueError("own")

    def naive(*words):
        asked.append(words)
        if answer is not None:
            raise answer

    monkeypatch.setattr(create.environment, "is_launched", lambda: is_launched)
    monkeypatch.setattr(create.environment, "is_helper", lambda: is_helper)
    monkeypatch.setattr(create.threads, "current", lambda: "thread" if is_thread else None)
    monkeypatch.setattr(create.messages, "NaiveCommunicator", naive)
    found = create._told_to_all(own, mpi_comm)
    assert asked == [(mpi_comm, {}, own)] * tells
    assert found is (answer if tells and type(answer) is ValueError else own)


HELPER = ("single", "started by a rank of the job, and not a rank itself")


@pytest.mark.parametrize(
    ("mpi_comm", "thread", "started", "launched", "helper", "forked", "fits"),
    [
        (None, True, None, True, False, False, ("threads", "inside run_threads")),
        ("mine", True, None, False, False, False, ("flat", "")),
        ("mine", False, None, False, False, False, ("flat", "")),
        (None, False, "MPI", False, False, False, ("flat", "")),
        (None, False, "MPI", True, True, False, ("flat", "")),
        (None, False, None, True, False, False, ("flat", "")),
        (None, False, None, True, False, True, ("flat", "")),
        (None, False, None, True, True, False, HELPER),
        (None, False, None, True, True, True, ("flat", "")),
        (None, False, None, False, False, False, ("single", "no launcher started this process")),
        (None, False, None, False, True, False, ("single", "no launcher started this process")),
    ],
)
def test_which_communicator_fits(monkeypatch, mpi_comm, thread, started, launched, helper, forked, fits):
    monkeypatch.setattr(create.threads, "current", lambda: "thread" if thread else None)
    monkeypatch.setattr(create.mpi, "started", lambda: started)
    monkeypatch.setattr(create.mpi, "is_forked", lambda: forked)
    monkeypatch.setattr(create.environment, "is_launched", lambda: launched)
    monkeypatch.setattr(create.environment, "is_helper", lambda: helper)
    assert create._what_fits(mpi_comm) == fits
