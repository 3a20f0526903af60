"""Tests of dbrdist.comm.communicators.threads."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist.core.array.config as core_config
from dbrdist import functions as F
from dbrdist.comm import run_threads, scatter_dataset
from dbrdist.comm.communicators import threads
from dbrdist.comm.communicators.threads import ThreadCommunicator
from dbrdist.core.array import random
from dbrdist.errors import CommunicatorError, UsageWarning
from dbrdist.links import Linear
from tests.comm import contract
from tests.each import each

LIMIT = 60


@pytest.mark.slow
def test_results_come_in_order_of_ranks():
    assert run_threads(3, lambda comm, x, *, y: (comm.rank, x, y), 5, y=6) == [(0, 5, 6), (1, 5, 6), (2, 5, 6)]


@pytest.mark.slow
def test_an_exception_on_one_rank_raises_in_the_caller_and_wakes_the_others():
    others = []

    def body(comm):
        if comm.rank == 1:
            raise KeyError("broken on purpose")
        try:
            comm.recv(1, 0) if comm.rank == 0 else comm.split(0, 0)
        except CommunicatorError as e:
            others.append(str(e))
            raise

    with pytest.raises(KeyError, match="on purpose") as info:
        run_threads(3, body, timeout_seconds=LIMIT)
    assert info.value.__notes__ == ["on rank 1 of 3"]
    assert len(others) == 2
    assert all("rank 1 failed with KeyError" in text for text in others)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


@pytest.mark.slow
def test_an_exception_wakes_ranks_that_wait_in_a_part():
    def body(comm):
        part = comm.split(comm.rank // 2, 0)
        if comm.rank == 3:
            raise ZeroDivisionError
        part.allreduce(np.ones(2)) if comm.rank < 2 else None
        part.barrier()
        comm.barrier()

    with pytest.raises(ZeroDivisionError):
        run_threads(4, body, timeout_seconds=LIMIT)


@pytest.mark.slow
def test_a_time_limit_ends_ranks_that_wait_for_ever():
    with pytest.raises(TimeoutError, match="rank 1"):
        run_threads(2, lambda comm: comm.recv(0, 0) if comm.rank else None, timeout_seconds=0.2)


@pytest.mark.slow
def test_ranks_have_their_own_configuration():
    def body(comm):
        core_config.config.train = comm.rank % 2 == 0
        core_config.config.dtype = ["float16", "float32", "float64", "bfloat16"][comm.rank]
        comm.barrier()
        for check in (contract.check_allreduce_every_type, contract.check_scatter):
            check(comm)
        return core_config.config.train, str(core_config.get_dtype())

    expected = [(True, "float16"), (False, "float32"), (True, "float64"), (False, "bfloat16")]
    assert run_threads(4, body) == expected
    assert core_config.config.train is True


@pytest.mark.slow
def test_bad_numbers_of_ranks():
    with pytest.raises(ValueError, match="at least 1 rank"):
        run_threads(0, lambda comm: None)
    assert threads.current() is None


@each(**{"num_bytes, waits": [(0, False), (1 << 16, False), ((1 << 16) + 1, True)]})
def test_a_message_of_64_kib_waits_for_nobody(num_bytes, waits):
    comm, seen = ThreadCommunicator(), []
    comm.ranks.world = SimpleNamespace(put=lambda *args: seen.append(args))
    call, part = SimpleNamespace(num_bytes=num_bytes, peer=3, tag=4), np.ones(2)
    comm.ranks.send_parts(call, "head", [part])
    ((got, key, (head, (copy,)), waited),) = seen
    assert (got, key, head, waited) == (call, (0, 3, 4), "head", waits) and not np.shares_memory(copy, part)


@pytest.mark.slow
@pytest.mark.parametrize("waits_on", ["part", "whole"])
def test_an_exception_goes_on_through_finalize(waits_on):
    """``finally: part.finalize()`` on a rank that failed meets others that are elsewhere; its error is what counts."""

    def program(comm):
        part = comm.split(0, comm.rank)
        try:
            if comm.rank == 1:
                raise KeyError("what went wrong")
            (part if waits_on == "part" else comm).barrier()
        finally:
            part.finalize()

    with pytest.raises(KeyError, match="what went wrong"):
        run_threads(2, program, timeout_seconds=30)


def test_finalize_of_one_rank_is_an_error_without_another():
    with pytest.raises(CommunicatorError, match=r"different verbs: finalize on rank 0.*barrier on rank 1"):
        run_threads(2, lambda comm: comm.barrier() if comm.rank else comm.finalize(), timeout_seconds=30)


def test_means_of_gradients_of_different_networks_are_warned_of():
    """A loop of one's own that forgot ``comm.bcast_data(model)``: networks of other seeds never become one."""

    def program(comm, seed, is_shared):
        random.set_seed(seed * comm.rank)
        model = Linear(3, 2)
        if is_shared:
            comm.bcast_data(model)
        for _ in range(3):
            model.cleargrads()
            F.sum(model(np.ones((2, 3), np.float32))).backward()
            comm.multi_node_mean_grad(model)

    with pytest.warns(UsageWarning, match=r"rank 1 and rank 2 have|ranks? 1.* other parameters than rank 0") as given:
        run_threads(3, program, 7, False)
    assert len(given) == 1
    run_threads(3, program, 7, True)
    run_threads(3, program, 0, False)


def test_a_group_of_links_with_named_parameters_is_averaged():
    def program(comm):
        link = Linear(3, 2)
        comm.bcast_data(link)
        link.cleargrads()
        F.sum(link(np.full((2, 3), comm.rank, np.float32))).backward()
        comm.multi_node_mean_grad(SimpleNamespace(namedparams=link.namedparams))
        return link.W.grad.tolist()

    assert run_threads(2, program) == [[[1.0] * 3] * 2] * 2


def test_a_rank_whose_color_is_undefined_is_in_no_part():
    parts = run_threads(3, lambda comm: comm.split(-32766 if comm.rank else 0, 0))  # MPI.UNDEFINED
    assert [part is None for part in parts] == [False, True, True]


def test_models_and_datasets_are_checked_by_name():
    def program(comm):
        with pytest.raises(TypeError, match="bcast_data expected a link, got int"):
            comm.bcast_data(3)
        with pytest.raises(TypeError, match="multi_node_mean_grad expected a link, got NoneType"):
            comm.allreduce_grad(None)
        with pytest.raises(TypeError, match="expected a communicator, got list; write scatter_dataset"):
            scatter_dataset(comm, [1, 2])
        with pytest.raises(TypeError, match="scatter_dataset: root expected a whole number, got str"):
            scatter_dataset([1, 2], comm, "shuffle")
        with pytest.raises(ValueError, match="scatter_dataset: root expected a rank from 0 to 1, got 7"):
            scatter_dataset([1, 2], comm, 7)

    run_threads(2, program)


def test_parts_of_a_communicator_have_names_of_their_own():
    """By which ranks that wait for each other are told apart."""

    def program(comm):
        parts = [comm.split(0, comm.rank), comm.split(comm.rank % 2, comm.rank), comm.split(0, -comm.rank)]
        return [part.ranks.world.name for part in parts], parts[0].split(0, 0).ranks.world.name

    (first, deep), (second, also_deep) = run_threads(2, program)
    assert first[0] == second[0] and first[2] == second[2] and deep == also_deep
    assert len({*first, *second, deep}) == 5 and all(name.startswith("threads/") for name in (*first, *second))
    assert deep == f"{first[0]}/1"


def test_a_verb_that_fails_half_way_fails_the_job_with_its_place():
    told = []
    own = SimpleNamespace(world=SimpleNamespace(job=SimpleNamespace(fail=told.append)))
    call = SimpleNamespace(record=SimpleNamespace(rank=3), verb="allreduce", where=lambda: "x.py:7")
    threads.ThreadRanks.failed_half_way(own, call, "ValueError: odd")
    assert told == ["rank 3 failed in allreduce (x.py:7) with ValueError: odd"]


def test_ranks_that_are_threads_do_not_keep_a_program_alive():
    assert run_threads(2, lambda comm: (threading.current_thread().daemon, threading.current_thread().name)) == [
        (True, "rank 0"), (True, "rank 1"),
    ]  # fmt: skip
