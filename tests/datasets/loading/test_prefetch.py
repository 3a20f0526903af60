"""Tests of dbrdist.datasets.loading.prefetch."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dbrdist import iterators
from dbrdist.datasets import AugmentedDataset, TupleDataset
from dbrdist.datasets.loading import prefetch
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.prefetch import MultithreadIterator
from dbrdist.errors import LoaderError
from dbrdist.iterators import MultiprocessIterator, SerialIterator
from tests.datasets.loader_examples import Doomed, Environment, Numbers, Threads, add_noise, run
from tests.each import each


class Slow:
    """Examples that take a while: the threads are busy when the iterator ends."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(0.01)
        return i


def test_threads_are_gone_when_finalize_returns():
    before = set(threading.enumerate())
    iterator = MultithreadIterator(Slow(), 4, n_threads=3)
    assert len(iterator.next()) == 4
    assert set(threading.enumerate()) - before
    iterator.finalize()
    assert set(threading.enumerate()) <= before


def threads(*args, **kwargs):
    return MultithreadIterator(*args, n_threads=2, **kwargs)


def processes(*args, **kwargs):
    return MultiprocessIterator(*args, n_processes=2, **kwargs)


@pytest.mark.programs
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("make", [threads, processes])
def test_reading_ahead_changes_nothing(make, rank):
    data = AugmentedDataset(TupleDataset(np.zeros((11, 2, 3, 1)), np.arange(11, dtype=np.int32)), add_noise)
    options = {"seed": 2, "last": "short", "rank": rank, "size": 3}
    expected = run(SerialIterator(data, 4, **options), 8)
    with make(data, 4, **options) as it:
        assert run(it, 8) == expected
    numbers = [n for batch in expected for row in batch[0][0] for n in np.ravel(row)]
    assert len(set(numbers)) == len(numbers)  # no noise is drawn twice, in no epoch


@pytest.mark.slow
@pytest.mark.parametrize("make", [threads, processes])
def test_one_epoch_read_ahead_ends(make):
    with make(Numbers(10), 4, repeat=False, shuffle=False) as it:
        assert [[int(y) for _, y in batch] for batch in it] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        it.reset()
        assert len(list(it)) == 3


@pytest.mark.slow
def test_channels_last_batches_stay_so_on_their_way_from_a_worker():
    images = np.arange(8 * 4 * 5 * 3, dtype=np.uint8).reshape(8, 4, 5, 3).transpose(0, 3, 1, 2)
    big = np.repeat(images, 600, axis=2)[:, :, :, :].transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    with processes(TupleDataset(big, np.arange(8)), 8, shuffle=False) as it:
        x, y = concat_examples(next(it))
    assert x.strides == big.strides
    assert np.array_equal(x, big)
    assert y.tolist() == list(range(8))


@pytest.mark.programs
def test_a_copy_goes_on_by_itself():
    with processes(Numbers(10), 3, seed=1) as it:
        run(it, 2)
        other = copy.copy(it)
        with other:
            assert run(other, 3) == run(it, 3)


@pytest.mark.parametrize("make", [threads, pytest.param(processes, marks=pytest.mark.programs)])
def test_a_pickled_iterator_goes_on_by_itself(make):
    with make(Numbers(10), 3, seed=1) as it:
        run(it, 2)
        with pickle.loads(pickle.dumps(it)) as other:
            assert other.epoch_detail == it.epoch_detail
            assert run(other, 3) == run(it, 3)


def test_a_finalized_iterator_says_so():
    it = threads(Numbers(10), 3)
    next(it)
    it.finalize()
    with pytest.raises(RuntimeError, match="MultithreadIterator was finalized"):
        next(it)


def test_threads_start_again_with_reset_and_processes_do_not():
    it = threads(Numbers(10), 3, shuffle=False)
    first = run(it, 2)
    it.finalize()
    it.reset()
    assert run(it, 2) == first
    it.finalize()
    workers = processes(Numbers(10), 3)
    workers.finalize()
    with pytest.raises(NotImplementedError, match="make a new one"):
        workers.reset()


@pytest.mark.programs
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("how", "text"), [("kill", "was killed by SIGKILL"), ("exit", "ended with exit code 7")])
def test_a_worker_that_dies_is_an_error_in_time(how, text):
    with processes(Doomed(40, 17, how), 4, shuffle=False) as it:
        run(it, 4)
        with pytest.raises(LoaderError, match=f"{text}.* after 2 batches"):
            next(it)


@pytest.mark.programs
@pytest.mark.timeout(60)
def test_a_worker_killed_from_outside_is_an_error_in_time():
    with processes(Numbers(1000), 4) as it:
        run(it, 3)
        os.kill(it._pool.pids[1], signal.SIGKILL)
        with pytest.raises(LoaderError, match="was killed by SIGKILL"):
            run(it, 10)


@pytest.mark.slow
def test_an_exception_in_a_worker_is_raised_here_with_its_traceback():
    with processes(Doomed(40, 17, "raise"), 4, shuffle=False) as it:
        run(it, 4)
        for _ in range(2):  # the position does not move, so the same batch fails again
            with pytest.raises(KeyError, match="example 17 is bad") as e:
                next(it)
            assert "loader_examples.py" in e.value.__notes__[0]
        assert it.current_position == 16


def test_an_exception_in_a_thread_is_raised_here():
    with threads(Doomed(40, 17, "raise"), 4, shuffle=False) as it:
        run(it, 4)
        with pytest.raises(KeyError, match="example 17 is bad"):
            next(it)


@pytest.mark.slow
def test_a_slow_worker_is_warned_of_and_waited_for():
    with processes(Doomed(8, 0, "sleep"), 4, shuffle=False, dataset_timeout=0.1) as it:
        with pytest.warns(MultiprocessIterator.TimeoutWarning, match=r"for 0.1 seconds; still waiting"):
            batch = next(it)
        assert [int(y) for _, y in batch] == [0, 1, 2, 3]


def test_a_dataset_that_cannot_be_pickled_is_refused():
    it = processes(AugmentedDataset(Numbers(8), lambda example, rng: example), 4)
    with pytest.raises(TypeError, match=r"expected a dataset that can be pickled .* AugmentedDataset cannot"):
        next(it)


@pytest.mark.programs
def test_workers_are_no_ranks_and_hear_no_signals_of_the_job(monkeypatch):
    for name in ("PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    with processes(Environment(4), 2) as it:
        assert list(next(it)) == [([], False), ([], False)]
        next(it)  # now both workers have answered, so they have begun
        for pid in it._pool.pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)
        assert run_lengths(it, 6) == [2] * 6


@pytest.mark.programs
def test_a_worker_has_one_thread(monkeypatch):
    """Examples are spread over processes; threads inside of each would take the cores of the ranks."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    with processes(Threads(4), 2) as it:
        for sizes, variable in next(it):
            assert (set(sizes) | {1}, variable) == ({1}, "1")


def run_lengths(it, n):
    return [len(next(it)) for _ in range(n)]


@pytest.mark.programs
def test_workers_are_replaced_after_their_tasks():
    expected = run(SerialIterator(Numbers(40), 4, seed=2), 12)
    with processes(Numbers(40), 4, seed=2, maxtasksperchild=2) as it:
        first = set()
        got = run(it, 1)
        first.update(it._pool.pids)
        got += run(it, 11)
        assert not first & set(it._pool.pids)
        assert got == expected


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # gone, also while its file is read
        return False


def wait_until_gone(pids, seconds=30):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.programs
def test_workers_end_with_an_iterator_that_is_forgotten():
    it = processes(Numbers(40), 4)
    next(it)
    pids = it._pool.pids
    del it
    gc.collect()
    assert wait_until_gone(pids) == []


SCRIPT = """
import sys, time
sys.path[:0] = {path!r}
from tests.datasets.loader_examples import Numbers
from dbrdist.iterators import MultiprocessIterator
if __name__ == "__main__" or not {guard}:
    it = MultiprocessIterator(Numbers(40), 4, n_processes=2)
    next(it)
    print(*it._pool.pids, flush=True)
    if {stay}:
        time.sleep(60)
"""


def script(tmp_path, stay, guard=True):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(path=sys.path, stay=stay, guard=guard))
    return subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.programs
@pytest.mark.timeout(60)
def test_a_script_from_standard_input_has_workers():
    text = SCRIPT.format(path=sys.path, stay=False, guard=True)
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 2


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    parent = script(tmp_path, stay=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    assert wait_until_gone(pids) == []


@pytest.mark.programs
@pytest.mark.timeout(60)
def test_a_script_that_does_not_finalize_ends_in_time(tmp_path):
    parent = script(tmp_path, stay=False)
    out, err = parent.communicate(timeout=50)
    assert (parent.returncode, err) == (0, "")
    assert wait_until_gone([int(pid) for pid in out.split()]) == []


@pytest.mark.programs
@pytest.mark.timeout(60)
def test_a_script_without_main_guard_gets_a_hint(tmp_path):
    parent = script(tmp_path, stay=False, guard=False)
    _, err = parent.communicate(timeout=50)
    assert parent.returncode == 1
    assert "LoaderError" in err and "a script needs `if __name__ ==" in err


@each(
    **{"num_samples, num_threads, size": [
        (1, 1, 4), (8, 1, 4), (9, 1, 6), (64, 4, 8), (65, 4, 10), (72, 4, 10), (512, 8, 32), (10_000, 8, 32),
        (100, 16, 4),
    ]}
)  # fmt: skip
def test_threads_take_half_of_their_share_at_a_time(num_samples, num_threads, size):
    assert prefetch._share_size(num_samples, num_threads) == size


@each(ready=[False, True])
def test_a_copy_of_an_iterator_has_threads_of_its_own(ready):
    with iterators.MultithreadIterator(list(range(10)), 2, shuffle=False, n_threads=2) as it:
        if ready:
            next(it)
        other = copy.copy(it)
        assert other._pool is None and len(other._ahead) == 0 and other.skipped is not it.skipped
        found = [next(other) for _ in range(3)]
        assert found == [next(it) for _ in range(3)] and other._pool is not it._pool
        other.finalize()
        assert len(next(it)) == 2
