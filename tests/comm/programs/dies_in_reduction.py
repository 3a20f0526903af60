"""Ranks that die, or fail, while all add gradients in place: ``dies_in_reduction.py kill|raise|all``."""

import os
import signal
import sys
import time

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.gradients import shared_gradients
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter

how = sys.argv[1]
comm = create_communicator("flat")
model = Link()
with model.init_scope():
    model.w = Parameter(np.zeros(1 << 18, np.float32))
    model.w.grad = np.ones(1 << 18, np.float32)
comm.multi_node_mean_grad(model)
with open("/proc/self/maps") as maps:
    print(f"shares {'memfd:dbrdist' in maps.read()}", flush=True)
comm.barrier()
add = shared_gradients._add_in_place


def fail(*args):
    if comm.rank == 1 or how == "all":
        if how == "raise":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    add(*args)


shared_gradients._add_in_place = fail
comm.multi_node_mean_grad(model)
time.sleep(200)
