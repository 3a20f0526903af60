"""Which policy goes with which settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.steps.header import Steps
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.comm.steps.policies.compressed import Compressed
from dbrdist.comm.steps.policies.delayed import Delayed
from dbrdist.comm.steps.policies.local import Local
from dbrdist.comm.steps.policies.one_rank import OneRank
from dbrdist.comm.steps.policies.policy import StepPolicy
from dbrdist.comm.steps.policies.sharded import Sharded
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import StepState

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import GradientMethod

# By the option that asks for it; at most one of them is in use (``core/names/exclusions.py``).
_OF_OPTION: dict[str, type[StepPolicy]] = {
    "zero": Sharded,
    "compression": Compressed,
    "local_steps": Local,
    "double_buffering": Delayed,
}


def policy_for(
    comm: CommunicatorBase,
    optimizer: GradientMethod,
    zero_fill: bool,
    way: StepOptions,
    headers: Steps,
    carried: StepState,
) -> StepPolicy:
    """The policy of a multi-node optimizer with these settings."""
    kind: type[StepPolicy] = OneRank
    if comm.size > 1:
        [kind] = [_OF_OPTION[option] for option in way.written() if option in _OF_OPTION] or [AllRanks]
    return kind(comm, optimizer, zero_fill, way, headers, carried)
