"""The updaters by name, as in `chainer.training.updaters`."""

from dbrdist.training.updater import StandardUpdater as StandardUpdater
