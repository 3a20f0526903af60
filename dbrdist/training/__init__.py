"""The training loop: trainer, updaters, triggers, extensions."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.training import extensions as extensions
from dbrdist.training import triggers as triggers
from dbrdist.training import updaters as updaters
from dbrdist.training.extension import PRIORITY_EDITOR as PRIORITY_EDITOR
from dbrdist.training.extension import PRIORITY_READER as PRIORITY_READER
from dbrdist.training.extension import PRIORITY_WRITER as PRIORITY_WRITER
from dbrdist.training.extension import Extension as Extension
from dbrdist.training.extension import make_extension as make_extension
from dbrdist.training.mirrored import mean_over_mirrored as mean_over_mirrored
from dbrdist.training.parallel_updater import ParallelUpdater as ParallelUpdater
from dbrdist.training.trainer import Trainer as Trainer
from dbrdist.training.triggers import IntervalTrigger as IntervalTrigger
from dbrdist.training.triggers import get_trigger as get_trigger
from dbrdist.training.updater import StandardUpdater as StandardUpdater
from dbrdist.training.updater import Updater as Updater

_explain_constructors({**vars(triggers), **vars(updaters), **globals()})
__getattr__ = _explained(__name__)
