"""An optimizer that keeps all ranks synchronised: how it is made, copied and saved. Its steps: ``joint_steps.py``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients.compression import Compression
from dbrdist.comm.steps.delegation import HandsOn, class_for
from dbrdist.comm.steps.joint_steps import JointSteps
from dbrdist.comm.steps.step_options import checked_way
from dbrdist.core.update.optimizer import GradientMethod, Optimizer
from dbrdist.core.usage.mistakes import given_a_class

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.model.link import Link


def create_multi_node_optimizer(
    actual_optimizer: GradientMethod | int,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    zero: int = 0,
    compression: Compression | None = None,
    accumulate: int = 1,
    local_steps: int = 1,
) -> Any:
    """``actual_optimizer`` with gradients averaged over the ranks of ``communicator``.

    The first update broadcasts rank 0's parameters, and updates. Hyperparameters (``lr``, ``momentum``, ...) read and
    set those of ``actual_optimizer``; a name that it does not have is refused.

    Args:
        actual_optimizer: any optimizer; what :meth:`setup` of either is called with is the target of both.
        communicator: the ranks.
        double_buffering: update with the means of the step before, which are sent while this step computes. The first
            step only sends. This changes the training: each gradient is applied one step late.
        zero_fill: count a parameter that got no gradient on any rank as gradient zero. False leaves it out of the
            reduction; the update still counts it as zero.
        zero: 1 divides the optimizer's state over the ranks, 2 the gradients too (ZeRO, Rajbhandari et al. 2020, arXiv
            1910.02054); 0 does not. Each rank then updates its part of the parameters. ``p.grad`` is the mean only in
            that part, so that hooks must work on parts: ours do, others need an attribute ``works_on_shards = True``.
            Save inside :meth:`MultiNodeOptimizer.whole_state`.
        compression: :class:`~dbrdist.comm.gradients.compression.PowerSGD` or
            :class:`~dbrdist.comm.gradients.compression.TopK`: send fewer bytes, and add what was left out to the next
            gradient.
        accumulate: calls of ``update`` for one step. All but the last only add up gradients, without communication; the
            step has the mean over all examples of them.
        local_steps: steps that a rank makes alone between two averages of the parameters (local SGD, Stich 2019, arXiv
            1805.09767); 1 averages gradients in every step instead. Optimizer state stays each rank's own.

    Raises:
        ValueError: for settings that are out of range or cannot be combined.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> optimizer = dbrdist.comm.create_multi_node_optimizer(optimizers.SGD(0.1), comm).setup(L.Linear(2, 1))
    """
    if isinstance(actual_optimizer, type):
        raise given_a_class("create_multi_node_optimizer", actual_optimizer, "an optimizer")
    if not isinstance(actual_optimizer, Optimizer):
        hint = "write create_multi_node_optimizer(optimizer, comm)"
        hint = "it is a multi-node optimizer already" if hasattr(actual_optimizer, "actual_optimizer") else hint
        raise TypeError(f"expected an optimizer, got {type(actual_optimizer).__name__}; {hint}")
    if not isinstance(communicator, CommunicatorBase):
        got, hint = type(communicator).__name__, "write comm = create_communicator(), and pass comm"
        raise TypeError(f"expected a communicator, got {got}; {hint}")
    if isinstance(double_buffering, str):
        raise TypeError(f"double_buffering: expected True or False, got the text {double_buffering!r}")
    way = checked_way(double_buffering, zero, compression, accumulate, local_steps, zero_fill)
    if way.zero and not isinstance(actual_optimizer, GradientMethod):
        raise TypeError(f"zero={zero}: expected an optimizer with update rules, got {type(actual_optimizer).__name__}")
    kind: Any = type(actual_optimizer)
    return class_for(MultiNodeOptimizer, kind)(actual_optimizer, communicator, zero_fill, way)


class MultiNodeOptimizer(JointSteps):
    """Wraps ``actual_optimizer``; made by :func:`create_multi_node_optimizer`."""

    __slots__ = ()

    # ---- copies ----

    def __copy__(self) -> MultiNodeOptimizer:
        """Another wrapper of the same optimizer and target, which continues from the same step."""
        new = object.__new__(type(self))
        for name in (*HandsOn.__slots__, *JointSteps.__slots__):
            value = getattr(self, name)
            setattr(new, name, copy.copy(value) if name == "_policy" else value)
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> MultiNodeOptimizer:
        """An optimizer of its own, over the same ranks, whose target is a copy. It continues where this one is.

        Every rank copies its own; then all ranks step with the copies in the same order. No rank is waited for.
        """
        actual = copy.deepcopy(self.actual_optimizer, memo)
        way = self._way._replace(compression=copy.deepcopy(self._way.compression, memo))
        new = type(self)(actual, self.communicator, self.zero_fill, way)
        memo[id(self)] = new
        new.num_samples, new.exposed_seconds = self.num_samples, self.exposed_seconds
        is_in_step = self._is_synchronized and self._target is not None and self._target is self.target
        known = {copy.deepcopy(p, memo) for p in self._known} if is_in_step else None
        new.continue_from(
            self._carried.copied(way, memo), self._steps.introduction.copied(self.t), actual.target, known
        )
        return new

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, because its communicator belongs to this process; save its "
            "state with dbrdist.serializers, or pickle its actual_optimizer and wrap that in "
            "create_multi_node_optimizer again"
        )

    # ---- what it is set up with, and its state ----

    def setup(self, link: Link) -> MultiNodeOptimizer:
        """Take a link as the target."""
        self.actual_optimizer.setup(link)
        self._is_synchronized, self._target = False, None
        return self

    @property
    def num_local_steps(self) -> int | None:
        """Steps of this rank by itself since the ranks averaged their parameters; None where all steps are joint."""
        return self._carried.num_local if self._way.local_steps > 1 and self.communicator.size > 1 else None

    @contextlib.contextmanager
    def whole_state(self, root: int = 0) -> Iterator[None]:
        """``with optimizer.whole_state():`` rank ``root`` can save what all ranks have. Collective.

        That is all of a divided state, and what each rank carries into its next step. It then needs the memory for it.
        Loading needs no such block; any ``zero`` and number of ranks loads it.
        """
        with contextlib.ExitStack() as stack:
            if self._policy.sharding is not None:
                stack.enter_context(self._policy.sharding.whole_state(root))
            stack.enter_context(self._carried.everyones_on(root, self.target))
            yield

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the wrapped optimizer; what one saves, an optimizer of any number of ranks loads.

        With compression, ``accumulate``, ``local_steps`` or ``double_buffering`` it has what this rank carries into its
        next step too, and inside :meth:`whole_state` what every rank does.
        """
        self.actual_optimizer.serialize(serializer)
        self._carried.serialize(serializer, self.target)
