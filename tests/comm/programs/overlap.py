"""What goes wrong while gradients travel during backward: ``overlap.py kill|raise|caught|leave|extra``."""

import os
import signal
import sys

import numpy as np

import dbrdist.core.tape.ops as ops
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients import bandwidth, overlap
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter

how = sys.argv[1]
bandwidth.bucket_bytes = lambda comm: 1 << 16
comm = create_communicator("flat", overlap=True)
model = Link()
with model.init_scope():
    for i in range(6):
        setattr(model, f"w{i}", Parameter(np.full(1 << 14, i + 1.0, np.float32)))
optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)


def loss():
    total = 0
    for p in model.params():
        total = ops.sum(p * p) + total
    while how in ("kill", "raise", "caught") and optimizer.t and optimizer._steps.poll() is None:
        pass
    return total


for _ in range(2):
    optimizer.update(loss)
ready = overlap.Overlap.ready


def fail(self, node):
    ready(self, node)
    if (comm.rank == 1 or how == "caught") and self._num_started == 3:
        if how != "kill":
            raise ValueError("in backward, on purpose")
        os.kill(os.getpid(), signal.SIGKILL)


if how in ("kill", "raise"):
    overlap.Overlap.ready = fail
    optimizer.update(loss)
elif how == "caught":
    overlap.Overlap.ready = fail
    try:
        optimizer.update(loss)
    except ValueError:
        optimizer.update(loss)
elif how == "leave":
    if comm.rank == 0:
        comm.recv(1, 0)  # which has left, and whose thread has nothing to do
elif how == "extra":
    optimizer.update(loss)
    if comm.rank == 1:
        optimizer.update(loss)
print(f"the end of rank {comm.rank}", flush=True)
