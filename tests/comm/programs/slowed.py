"""Trains with a trace while one rank sleeps at one place; rank 0 prints the summary as JSON."""

import json
import sys
import time

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients import shared_gradients
from dbrdist.comm.run import trace
from dbrdist.comm.transport import message
from dbrdist.iterators import SerialIterator
from dbrdist.training import StandardUpdater
from tests.comm.training_contract import Net

place, late, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
pause = {"seconds": 0.0}  # set by how long a step takes on this machine, as busy as it is
shared = sys.argv[4] == "shared"
comm = create_communicator("flat", shared_memory=shared)
rng = np.random.default_rng(0)
data = [(rng.normal(size=5), rng.normal(size=3)) for _ in range(48)]


def slowed(function):
    def slow(*args, **kwds):
        time.sleep(pause["seconds"])
        return function(*args, **kwds)

    return slow


class SlowIterator(SerialIterator):
    next = slowed(SerialIterator.next)


class SlowNet(Net):
    forward = slowed(Net.forward)


mine = comm.rank == late
if mine and place == "communication":
    shared_gradients._add_in_place = slowed(shared_gradients._add_in_place)
    message.divide = slowed(message.divide) if not shared else message.divide
kind = SlowIterator if mine and place == "data" else SerialIterator
model = (SlowNet if mine and place == "forward" else Net)(num_hidden=1000)  # more gradients than fit into a header
iterator = kind(data, 4 * comm.size, shuffle=False, rank=comm.rank, size=comm.size)
optimizer = create_multi_node_optimizer(optimizers.Adam().setup(model), comm)
updater = StandardUpdater(iterator, optimizer)
slowest = 0.0
for _ in range(4):
    began = time.perf_counter()
    updater.update()
    slowest = max(slowest, time.perf_counter() - began)
pause["seconds"] = min(max(0.2, 2 * max(comm.allgather_obj(slowest))), 2.0)
tracer = trace.Trace(comm)
tracer.start()
for _ in range(6):
    updater.update()
ranks = tracer.finish()
if comm.rank == 0:
    trace.write(path, ranks)
    print(json.dumps(trace.summarize(ranks)._asdict()))
    print("\n".join(trace.summarize(ranks).lines()))
