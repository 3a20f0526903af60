"""The updaters by name, as in `chainer.training.updaters`."""

from dbrdist.training.parallel_updater import MultiprocessParallelUpdater as MultiprocessParallelUpdater
from dbrdist.training.parallel_updater import ParallelUpdater as ParallelUpdater
from dbrdist.training.updater import StandardUpdater as StandardUpdater
