"""The settings of a multi-node optimizer: how gradients become updates."""

from __future__ import annotations

from typing import NamedTuple

from dbrdist.comm.gradients.compression import Compression
from dbrdist.comm.gradients.sharding import check_stage
from dbrdist.core.names.exclusions import conflicts


class StepOptions(NamedTuple):
    """How gradients become updates; see :func:`~dbrdist.comm.create_multi_node_optimizer`."""

    double_buffering: bool = False
    zero: int = 0
    compression: Compression | None = None
    accumulate: int = 1
    local_steps: int = 1

    def words(self) -> str:
        """One line for each setting."""
        compressed = "none" if self.compression is None else self.compression.words()
        lines = (*(f"{name} {value}" for name, value in self._replace(compression=None)._asdict().items()), compressed)
        return "".join(f"{line}\n" for line in lines)

    @property
    def carries(self) -> bool:
        """Whether something goes from one step into the next besides parameters and the optimizer's state."""
        is_local = self.accumulate > 1 or self.local_steps > 1
        return self.compression is not None or self.double_buffering or is_local

    def written(self) -> dict[str, str]:
        """The options that are in use, as a program writes them."""
        options = {
            "zero": f"zero={self.zero}" if self.zero else "",
            "compression": f"compression={type(self.compression).__name__}(...)" if self.compression else "",
            "local_steps": f"local_steps={self.local_steps}" if self.local_steps > 1 else "",
            "double_buffering": "double_buffering=True" if self.double_buffering else "",
            "accumulate": f"accumulate={self.accumulate}" if self.accumulate > 1 else "",
        }
        return {name: words for name, words in options.items() if words}

    def check_with(self, **others: str) -> None:
        """Raise ValueError where these options, or some with ``others``, exclude each other."""
        for _, words in conflicts({**self.written(), **others}):
            raise ValueError(words)


def checked_way(
    double_buffering: bool,
    zero: int,
    compression: Compression | None,
    accumulate: int,
    local_steps: int,
    zero_fill: bool,
) -> StepOptions:
    """The settings, if each is in range and they go together; ValueError or TypeError otherwise."""
    stage = check_stage(zero)
    _check_counts(accumulate, local_steps)
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(f"compression: expected PowerSGD(...) or TopK(...), got {type(compression).__name__}")
    way = StepOptions(bool(double_buffering), stage, compression, accumulate, local_steps)
    way.check_with(**({} if zero_fill else {"no_zero_fill": "zero_fill=False"}))
    return way


def _check_counts(accumulate: int, local_steps: float) -> None:
    for name, value in [("accumulate", accumulate), ("local_steps", local_steps)]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}")
