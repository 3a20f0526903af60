"""Datasets that loader processes can import."""

from __future__ import annotations

import os
import resource
import signal
import time

import numpy as np

from dbrdist.core.array import thread_pools
from dbrdist.datasets import DatasetMixin
from dbrdist.datasets.loading.convert import concat_examples


class Numbers(DatasetMixin):
    """Example i is (a channels-first image filled with i, label i)."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def get_example(self, i):
        return np.full((3, 2, 4), i, np.float32), np.int32(i)


class Doomed(Numbers):
    """Does something bad at example ``bad``."""

    def __init__(self, n, bad, how):
        super().__init__(n)
        self.bad = bad
        self.how = how

    def get_example(self, i):
        if i == self.bad:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "exit":
                os._exit(7)
            elif self.how == "raise":
                raise KeyError(f"example {i} is bad")
            elif self.how == "sleep":
                time.sleep(0.5)
        return super().get_example(i)


class Noisy(Numbers):
    """Example i depends on the seed and the epoch, as augmentation does."""

    def example_at(self, i, seed, epoch):
        return np.array([seed, epoch, i], np.int64), np.int32(i)


def add_noise(example, rng):
    """A transform of a user's: noise from the generator that it is handed."""
    image, label = example
    return image + rng.standard_normal(image.shape), label


class Environment(Numbers):
    """Example i is (variables that make MPI take a process for a rank, whether the session is the parent's)."""

    def __init__(self, n):
        super().__init__(n)
        self.session = os.getsid(0)

    def get_example(self, i):
        return sorted(k for k in os.environ if k.startswith(("PMI_", "OMPI_"))), os.getsid(0) == self.session


class Threads(Numbers):
    """Example i is the sizes of the pools of threads in the process that reads it, and what later ones will have."""

    def get_example(self, i):
        return [pool.size() for pool in thread_pools.pools()], os.environ["OMP_NUM_THREADS"]


class Broad(Numbers):
    """Example i is (60 KB that follow from i, seed and epoch; label i); files may have ``limit_bytes``."""

    def __init__(self, n, limit_bytes=None):
        super().__init__(n)
        self.limit_bytes = limit_bytes

    def example_at(self, i, seed, epoch):
        if self.limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit_bytes, resource.RLIM_INFINITY))
        return broad(i, seed, epoch), np.int32(i)


def broad(i, seed, epoch):
    """The array of example i of a :class:`Broad`."""
    return np.arange(60_000, dtype=np.uint32).astype(np.uint8) ^ np.uint8((7 * i + 31 * epoch + seed) % 256)


class Fixed:
    """Random numbers that are written down."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def state(it):
    return it.epoch, it.current_position, it.is_new_epoch, it.epoch_detail, it.previous_epoch_detail


def run(it, n):
    out = []
    for _ in range(n):
        batch = next(it)
        out.append(([a.tolist() for a in concat_examples(batch)], it.indices.tolist(), it.row, state(it)))
    return out
