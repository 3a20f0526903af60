"""A Trainer on each rank; rank 1 raises at the place that the first argument names. For failure/test_abort.py."""

import os
import sys

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_evaluator, create_multi_node_optimizer
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.core.chainer.function import FunctionNode
from dbrdist.core.model.reporter import report
from dbrdist.iterators import SerialIterator
from dbrdist.training import StandardUpdater, Trainer, extensions
from tests.comm.training_contract import Net

place, out = sys.argv[1:]
comm = create_communicator("flat")


def fail(here, value=None):
    """Raise where this is the place, in the third step or in what follows it; else the value."""
    if here == place and comm.rank == 1 and updater.iteration >= 2:
        raise ValueError(f"broken on purpose in {here}")
    return value


class Data:
    x, t = np.random.default_rng(0).normal(size=(24, 5)), np.ones((24, 3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return fail("dataset", (self.x[index], self.t[index]))


class Identity(FunctionNode):
    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grads):
        return fail("backward", grads)


class Failing(Net):
    def forward(self, x, t):
        return Identity().apply((fail("forward", super().forward(x, t)),))[0]

    def serialize(self, serializer):
        fail("snapshot")
        super().serialize(serializer)


share = {"rank": comm.rank, "size": comm.size, "seed": 0}
iterator = SerialIterator(Data(), 6, **share)
optimizer = create_multi_node_optimizer(optimizers.SGD(0.01), comm).setup(Failing())
optimizer.add_hook(lambda inner: fail("hook"), name="mine")
updater = StandardUpdater(iterator, optimizer)
trainer = Trainer(updater, (6, "iteration"), os.path.join(out, str(comm.rank)))
trainer.extend(StepAgreement(comm, iterator))
test = SerialIterator(Data(), 6, repeat=False, shuffle=False, **share)
evaluate = lambda x, t: report({"size": fail("evaluator", float(len(x)))})  # noqa: E731
evaluation = extensions.Evaluator(test, optimizer.target, eval_func=evaluate)
trainer.extend(create_multi_node_evaluator(evaluation, comm), trigger=(3, "iteration"))
trainer.extend(lambda trainer: comm.allreduce(fail("extension", np.ones(2))), name="mine", trigger=(1, "iteration"))
trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
trainer.run()
os.write(1, f"the end of rank {comm.rank}\n".encode())
