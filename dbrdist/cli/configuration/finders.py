"""What takes the place of a run: the search for a learning rate, and for a batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dbrdist.cli.configuration.settings import Count, Positive, Settings, refuse


class LearningRateFinder(Settings):
    """A short run that raises the learning rate from step to step, and suggests one."""

    lowest: Positive = 1e-6
    """The learning rate of the first step."""
    highest: Positive = 1.0
    """The learning rate of the last step."""
    steps: Annotated[int, Field(ge=10, le=100_000)] = 100
    """Number of steps; the test ends earlier where the loss has grown to four times its least value."""

    @model_validator(mode="after")
    def _rises(self) -> LearningRateFinder:
        if self.lowest >= self.highest:
            refuse("highest", f"expected more than lowest, {self.lowest:g}, got {self.highest:g}")
        return self


class BatchFinder(Settings):
    """Short runs with growing batches, which suggest one."""

    lowest: Count = 8
    """The first batch, over all ranks together; at least one example per rank is taken."""
    highest: Count = 65536
    """The largest batch; each one is twice the one before, as far as memory and the training set go."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Steps that are timed with each batch, after one that is not."""

    @model_validator(mode="after")
    def _rises(self) -> BatchFinder:
        if self.lowest > self.highest:
            refuse("highest", f"expected at least lowest, {self.lowest:,}, got {self.highest:,}")
        return self
