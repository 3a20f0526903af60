"""The header of a step: one row that each rank shows before its forward pass, and needs before the first reduction.

It says which step of which optimizer this is, with which parameters and hyperparameters, how many examples the rank
has, and whether it was asked to stop. Ranks that differ in what must be alike raise the same error, before any gradient
is averaged.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients.model import plan_for
from dbrdist.comm.gradients.overlap import Weights
from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT, ReductionPlan, weights
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.gate import Passage, digest, payload_bytes, words_of
from dbrdist.comm.steps.drift import Drift
from dbrdist.comm.steps.introduction import Introduction
from dbrdist.comm.steps.optimizer_settings import OptimizerValues, described
from dbrdist.core.model.link_hook import LinkHook
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.versions import Watch
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule

if TYPE_CHECKING:
    from dbrdist.comm.gradients.overlap import Overlap
    from dbrdist.comm.gradients.sharding import ZeroSharding
    from dbrdist.core.model.link import Link

# Step, parameters, hyperparameters, which parameters are reduced, which are new, the optimizer, its batches.
_NUM_SAME = 7
_WHAT = "the same step"
_CONSTANTS = (
    "eps", "decay", "rmax", "dmax", "axis", "ksize", "stride", "pad", "dilate", "groups", "cover_all", "n_heads",
    "norm_first", "pool_size", "ignore_label",
)  # fmt: skip
# Runs, samples, works, stop, place, encloses: these may differ; the checksum before them is of rounded numbers.
_differing = operator.itemgetter(payload_bytes(_NUM_SAME, 7))
_checksum = operator.itemgetter(slice(8))  # of these bytes
_own_words = operator.itemgetter(slice(8, None))
STALE = 2  # of a rank whose forward pass came before the parameters that all ranks have in common


class Steps:
    """The headers of one optimizer's steps."""

    def __init__(self, comm: CommunicatorBase, optimizer: GradientMethod, settings: str = "") -> None:
        """``settings`` are further words that all ranks must have in common, lines with a break at their end."""
        self._comm = comm
        self._gate = comm.gate
        self._settings = settings
        self._optimizer = optimizer
        self._plan: ReductionPlan | None = None
        self._early_plan: ReductionPlan | None = (
            None  # of the parameters that have shapes, while others wait for theirs
        )
        self.watch: Watch | None = None  # of what the plan rests on
        self._target: Link | None = None  # of which the watch speaks
        self._constants: list[str] = []  # of the target's links
        self._params_text = ""
        self._params_digest = self._runs_digest = 0
        self._values = OptimizerValues(optimizer)
        self.drift = Drift()
        self._num_plans_seen = -1  # by the values, which have the hooks of update rules too
        self.introduction = Introduction(comm)
        self._passage: Passage | None = None
        # What the words of the last header are made of.
        self._said: tuple[int, bool, str, str, Sequence[str]] = 0, True, "", "", ()
        self._header: Header | None = None
        self._last: Header | None = None
        self._heard_last: list[bytes] = []  # the words that may differ, of all ranks
        self._have_drifted = False  # their checksums did
        self.small_plan: ReductionPlan | None = None  # the one of now, once its gradients fit into the header,
        self.small_config: str | None = None  # and with which configuration
        self._is_refused = False  # waiting for it has raised on all ranks
        self.error: Exception | None = None  # of this rank, which all raise at the next header
        self.late: list[tuple[str, Parameter]] = []  # parameters that wait for their first input
        self.num_plans = 0  # more after each change of a parameter, a link or a rule

    def post(self, num_samples: int | None, works: int, zero_fill: bool, new: Sequence[str] = ()) -> None:
        """Show this rank's header, without waiting for the others'.

        Args:
            num_samples: of this rank.
            works: 1 if this rank has a forward pass, 0 if not, STALE if it had one with other parameters.
            zero_fill: of the optimizer.
            new: names of parameters that want values.
        """
        with self._gate.call("update") as call:
            self.look()
            row = self._row(num_samples, works, zero_fill, new, False)
            error, self.error = self.error, None
            call.post(row, error, num_same=_NUM_SAME, what=_WHAT, detail=self._in_words)
            self._passage, self._header, self._is_refused = call, None, False

    def exchange(self, call: Passage, num_samples: int | None, works: int, zero_fill: bool) -> Header:
        """The headers of all ranks, and with them the gradients if there is room for those that are there now."""
        watch = self.watch  # as look does, in a call less
        if watch is None or not watch.is_current() or self._target is not self._optimizer.target:
            self.look()
        plan = self._plan
        is_known = plan is self.small_plan and self._gate.config is self.small_config  # as in nearly every step
        enclosed = plan.collect() if plan is not None and (is_known or self.is_small()) else ()
        row = self._row(num_samples, works, zero_fill, (), bool(enclosed))
        self._passage = None
        error, self.error = self.error, None
        rows = call.exchange(row, error, num_same=_NUM_SAME, what=_WHAT, detail=self._in_words, enclosed=enclosed)
        return self._heard(rows)

    def _row(
        self, num_samples: int | None, works: int, zero_fill: bool, new: Sequence[str], encloses: bool
    ) -> tuple[int, ...]:
        """The words of this rank's header."""
        plan, values, step, introduction = self._plan, self._values, self._optimizer.t, self.introduction
        if self._num_plans_seen != self.num_plans or not values.are_as_before():
            values.look(self._settings)
            self._num_plans_seen = self.num_plans
        self._said = step, zero_fill, values.text, self._params_text, new
        return (
            step,
            self._params_digest,
            values.digest,
            zero_fill,
            digest("".join(new)) if new else 0,
            introduction.number,
            introduction.position() if introduction.divided else 0,
            self.drift.checksum,
            self._runs_digest,
            EQUAL_WEIGHT if num_samples is None else num_samples,
            works,
            self._comm.stop.request,
            0 if plan is None else plan.place,
            encloses,
        )

    def meet(self) -> Passage:
        """The verb in which this rank waits for the others' headers, and reduces: ``with steps.meet() as call``."""
        assert self._passage is not None
        call: Passage = self._gate.again(self._passage)
        return call

    def wait(self, call: Passage) -> Header:
        """The headers of all ranks."""
        if self._header is None:
            self._is_refused = True
            rows = call.wait_for_rows()
            self._is_refused = False
            self._header = self._heard(rows)
        return self._header

    def _heard(self, rows: list[bytes]) -> Header:
        """What these rows say; mostly what those of the last step said."""
        differing, last = [*map(_differing, rows)], self._last
        if last is None or differing != self._heard_last:
            checksums, own = [*map(_checksum, differing)], [*map(_own_words, differing)]
            self._have_drifted = checksums.count(checksums[0]) != len(checksums)
            self._heard_last = differing
            if last is None or last.rows != own:
                last = self._last = Header(own)
        if self._have_drifted:
            self.drift.is_suspected = True
        if self._comm.stop.answers is not last.stops:
            self._comm.stop.answers = last.stops
        return last

    def is_small(self) -> bool:
        """Whether the gradients fit into the header, as far as :meth:`look` knows them."""
        plan, config = self._plan, self._gate.config
        if plan is not None and plan is self.small_plan and config is self.small_config:
            return True
        is_small = plan is not None and self._comm.reducer.encloses(plan.grads)
        self.small_plan, self.small_config = plan if is_small and config is not None else None, config
        return is_small

    def poll(self) -> Header | None:
        """The headers of all ranks if they are there already."""
        if self._header is None and self._passage is not None and self._passage.is_answered():
            self.wait_early()
        return self._header

    def wait_early(self) -> None:
        """Wait for the headers before there is anything to reduce."""
        with self.meet() as call:
            self.wait(call)

    def break_off(self, error: BaseException) -> None:
        """This rank has failed while gradients were sent, at another bucket than others maybe: nothing can follow.

        Where the headers disagreed, none were sent, and all ranks have raised.
        """
        assert self._passage is not None
        if not self._is_refused:
            self._passage.break_off(error)

    def shown_plan(self) -> ReductionPlan:
        """The plan of what the header spoke of; there is one where gradients came with it."""
        assert self._plan is not None
        return self._plan

    @property
    def last_plan(self) -> ReductionPlan | None:
        """The plan of the last header; None before the first, or while parameters wait for their shapes."""
        return self._plan

    @property
    def place(self) -> tuple[str, int]:
        """The line of the call."""
        assert self._passage is not None
        return self._passage.place

    def plan(self) -> ReductionPlan | None:
        """A plan of what the header spoke of; None where the forward pass has changed the parameters since."""
        said = self._params_digest, self._plan
        self.look()
        return self._plan if said == (self._params_digest, self._plan) else None

    def current_plan(self) -> ReductionPlan:
        """The plan of what is updated now: while some parameters wait for their shapes, of the others."""
        self.look()
        if self._plan is not None:
            return self._plan
        if self._early_plan is None:
            named = [(name, p) for name, p in self._named_updated() if p.is_initialized]
            self._early_plan = plan_for(self._comm, named)
            self._runs_digest = self._early_plan.runs_digest
        return self._early_plan

    def overlap(self, division: ZeroSharding | None = None) -> Overlap | None:
        """What reduces the plan's gradients while backward runs; None where they are reduced after it.

        With a ``division`` each rank gets its part alone, once the ranks have agreed on the parts.
        """
        plan = self._plan
        if plan is None:
            return None
        plan.division = division
        return plan.overlap if division is None or division.place == plan.place else None

    def _named_updated(self) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in self._optimizer.target.namedparams() if _is_updated(p)]

    def look(self) -> None:
        """Plan again if a parameter, a link or a rule has changed."""
        watch = self.watch
        if watch is not None and watch.is_current() and self._target is self._optimizer.target:
            return
        self.num_plans += 1
        target = self._optimizer.target
        if target is not self._target:  # once: a change that all ranks make may be seen later on some
            self._target, self._constants = target, _constants(target)
        named = list(target.namedparams())
        self.late = [(name, p) for name, p in named if not p.is_initialized]
        updated = [(name, p) for name, p in named if _is_updated(p)]
        self._plan, self.small_plan = None if self.late else plan_for(self._comm, updated), None
        has_rules = isinstance(self._optimizer, GradientMethod)  # without one nothing updates a parameter
        self.drift.plan((name, p) for name, p in updated if p.update_rule is not None or not has_rules)
        self._early_plan = None
        self._runs_digest = 0 if self._plan is None else self._plan.runs_digest
        self._params_text = agree.as_lines([_describe(name, p, has_rules) for name, p in named] + self._constants)
        self._params_digest = digest(self._params_text)
        params = list(dict.fromkeys(p for _, p in named))
        rules = [p.update_rule for p in params if isinstance(p.update_rule, UpdateRule)]
        self.watch = Watch([*target.links(), *params, *rules, *(rule.hyperparam for rule in rules)])

    def compare_parameters(self) -> None:
        """Raise CommunicatorError on every rank if their parameters have drifted apart. Collective."""
        self.drift.compare(self._comm, self._optimizer.t, self._values.own_hooks)

    def _in_words(self) -> str:
        step, zero_fill, values, params, new = self._said
        come = f"new parameters {', '.join(new)}\n" if new else ""
        return f"step {step}\nzero_fill {zero_fill}\n{self.introduction.in_words()}{values}{params}{come}"


class Header:
    """What all ranks showed. It holds for later steps whose ranks show the same.

    Args:
        rows: the words of each rank that may differ, in bytes.
    """

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows
        words = zip(*(words_of(row) for row in rows))
        runs, self.counts, works, stops, self.places, encloses = words
        self.stops = np.array(stops, np.int64)
        self.same_runs = runs.count(runs[0]) == len(runs)
        self.is_placed = self.same_runs and self.places[0] != 0 and self.places.count(self.places[0]) == len(runs)
        self.is_enclosed = self.same_runs and all(encloses)  # the gradients of all ranks came with it
        self.workers = [rank for rank, does in enumerate(works) if does]  # ranks with a forward pass
        self.stale = [rank for rank, does in enumerate(works) if does == STALE]
        self.known_weights: Weights | None = None  # once they were asked for

    def weights(self) -> Weights:
        """(factor of each rank, divisor of the sum); raises where the numbers of examples do not go together."""
        if self.known_weights is None:
            self.known_weights = weights(self.counts)
        return self.known_weights


def _constants(target: Link) -> list[str]:
    """One line for each constant of our links, and for each of our hooks that replaces a weight.

    Ranks that differ in one average gradients of different networks. What a program defines may be each rank's own.
    """
    found = []
    for path, link in target.namedlinks():
        values = link.__dict__
        if _is_ours(link):
            lines = [f"{name} {values[name]!r}" for name in _CONSTANTS if values.get(name) is not None]
            found += [f"{path.rstrip('/')}/{line}" for line in lines]
        for hook in (values.get("_hooks") or {}).values():
            if _is_ours(hook) and type(hook).stand_ins is not LinkHook.stand_ins:
                found.append(f"{path} hook {type(hook).__name__}")
    return found


def _is_ours(thing: Link | LinkHook) -> bool:
    return type(thing).__module__.startswith("dbrdist.")


def _is_updated(p: Parameter) -> bool:
    """All but the frozen ones, whose gradients nobody reads."""
    return p.update_rule is None or bool(getattr(p.update_rule, "enabled", True))


def _describe(name: str, p: Parameter, has_rules: bool) -> str:
    what = f"{name} {tuple(p.shape)} {p.dtype.name}" if p.is_initialized else f"{name} (uninitialised)"
    if not _is_updated(p):
        what += " frozen"
    if p.update_rule is None:
        return f"{what} without an update rule" if has_rules else what
    if not isinstance(p.update_rule, UpdateRule):  # whatever has an update(param) works, too
        return f"{what} updated by {type(p.update_rule).__name__}"
    if p.update_rule.is_in_fp32(p):
        what += " in float32"
    return " ".join([what, *described(p.update_rule.hyperparam.own())])
