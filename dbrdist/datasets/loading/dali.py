"""Batches of a pipeline of NVIDIA DALI, which reads and decodes them itself, on the GPU if it is set up so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.datasets.loading.serial import Iterator

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer


class DaliIterator(Iterator):
    """The outputs of a DALI pipeline, with the counters that a trainer asks for.

    A batch is what ``pipeline.run()`` returns, a tuple of DALI's lists of tensors; give the updater a converter that
    makes arrays of them. DALI need not be installed for this module: the pipeline brings it along.

    The state that is saved is the counters. The pipeline itself starts over: its order of examples cannot be resumed.

    Args:
        pipeline: a ``nvidia.dali.pipeline.Pipeline``; it is built at the first batch.
        repeat: continue forever, or stop after one epoch.

    Example:
        >>> iterator = iterators.DaliIterator(pipeline)  # doctest: +SKIP
    """

    def __init__(self, pipeline: Any, repeat: bool = True) -> None:
        for method in ("build", "run", "epoch_size"):
            if not callable(getattr(pipeline, method, None)):
                raise TypeError(f"expected a DALI pipeline, got {type(pipeline).__name__}, which has no {method}()")
        self.pipeline = pipeline
        self.repeat = repeat
        self._epoch_size: int | None = None
        self.reset()

    def reset(self) -> None:
        """Count from the start of epoch 0 again; the pipeline continues where it is."""
        self.current_position = 0
        self.epoch = 0
        self.is_new_epoch = False
        self._previous_epoch_detail = -1.0

    @property
    def batch_size(self) -> int:
        """Examples per batch."""
        size = getattr(self.pipeline, "max_batch_size", None)  # DALI 1.0 gave it this name
        return int(self.pipeline.batch_size if size is None else size)

    @property
    def epoch_size(self) -> int:
        """Examples in an epoch, as the pipeline's first reader says."""
        if self._epoch_size is None:
            self.pipeline.build()
            sizes = self.pipeline.epoch_size()
            sizes = list(sizes.values()) if isinstance(sizes, dict) else [sizes]
            if not sizes or sizes[0] < 1:
                raise ValueError("expected a DALI pipeline with a reader that has examples, got one without")
            self._epoch_size = int(sizes[0])
        return self._epoch_size

    def __next__(self) -> Any:
        size = self.epoch_size
        if not self.repeat and self.epoch > 0:
            raise StopIteration
        self._previous_epoch_detail = self.epoch_detail
        end = self.current_position + self.batch_size
        self.is_new_epoch = end >= size
        if self.is_new_epoch:
            self.epoch += 1
            end = end - size if self.repeat else 0
        self.current_position = end
        return self.pipeline.run()

    next = __next__

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self.epoch + (self.current_position / self.epoch_size if self.current_position else 0)

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the counters by ``serializer``, or set them to saved ones."""
        self.current_position = int(serializer("current_position", self.current_position))
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", int(self.is_new_epoch)))
        self._previous_epoch_detail = float(serializer("previous_epoch_detail", self._previous_epoch_detail))
