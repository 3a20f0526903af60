"""The settings of a multi-node optimizer: how gradients become updates."""

from __future__ import annotations

from typing import Any, NamedTuple

from dbrdist.comm.gradients.compression import Compression
from dbrdist.comm.gradients.sharding import check_stage


class Way(NamedTuple):
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

    def check_dynamic_scale(self) -> None:
        """Refuse a loss scale that changes between a gradient and its use, or on one rank alone."""
        if self.double_buffering or self.compression is not None:
            raise ValueError(
                "a dynamic loss scale does not work with double_buffering or compression, which use gradients of "
                "earlier steps; set a constant one"
            )
        if self.local_steps > 1:
            raise ValueError(
                "a dynamic loss scale does not work with local_steps, where each rank would follow its own overflows; "
                "set a constant one"
            )


def checked_way(
    double_buffering: Any, zero: Any, compression: Any, accumulate: Any, local_steps: Any, zero_fill: bool
) -> Way:
    """The settings, if each is in range and they go together; ValueError or TypeError otherwise."""
    stage = check_stage(zero)
    _check_counts(accumulate, local_steps)
    ways = {
        "double_buffering=True": double_buffering,
        f"zero={zero}": stage,
        "compression": compression is not None,
        f"local_steps={local_steps}": local_steps > 1,
    }
    chosen = [name for name, value in ways.items() if value]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} cannot be combined; use only one of them")
    if chosen and not stage and not zero_fill:
        raise ValueError(f"zero_fill=False does not work with {chosen[0]}, which needs a gradient of every parameter")
    if compression is not None and not isinstance(compression, Compression):
        raise TypeError(f"compression: expected PowerSGD(...) or TopK(...), got {type(compression).__name__}")
    return Way(bool(double_buffering), stage, compression, accumulate, local_steps)


def _check_counts(accumulate: Any, local_steps: Any) -> None:
    for name, value in [("accumulate", accumulate), ("local_steps", local_steps)]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}")
    if accumulate > 1 and local_steps > 1:
        raise ValueError("accumulate and local_steps cannot be combined; use only one of them")
