"""Iterators that must do without what Chainer's had: a fork of the program."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

from dbrdist.compat import program
from dbrdist.datasets.loading import prefetch
from dbrdist.datasets.loading.order import Step
from dbrdist.datasets.loading.serial import read_step


class MultiprocessIterator(prefetch.MultiprocessIterator):
    """As natively, but it reads the batches in this process where no other process can.

    Chainer forks the program; here workers are new interpreters, which import the main file and unpickle the dataset.
    A main file without ``if __name__ == "__main__":``, or a dataset that cannot be pickled, leaves that out: the
    batches are the same, and a warning says so once.
    """

    _reads_here: bool | None = None

    def _submit(self, own: Step, whole: Step) -> Any:
        if self._reads_here is None:
            why = self._why_not_elsewhere()
            self._reads_here = why is not None
            if why is not None:
                warnings.warn(
                    f"MultiprocessIterator reads its batches in this process, because {why}", UserWarning, stacklevel=5
                )
        return (own, whole) if self._reads_here else super()._submit(own, whole)

    def _why_not_elsewhere(self) -> str | None:
        if not program.has_main_guard():
            return 'the main file has no `if __name__ == "__main__":`, so that no other process can import it'
        try:
            pickle.dumps(self.dataset)
        except Exception as error:  # pickle passes on whatever the object's own methods raise
            return f"the dataset cannot be pickled for other processes: {error}"
        return None

    def _collect(self, ticket: Any) -> tuple[Any, list[str]]:
        if not self._reads_here:
            return super()._collect(ticket)
        own, whole = ticket
        return read_step(self.dataset, own, self.seed, whole)
