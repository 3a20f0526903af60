"""The header of a step: one row that each rank shows before its forward pass, and needs before the first reduction.

It says which step this is, with which parameters and hyperparameters, how many examples the rank has, and whether it
was asked to stop. Ranks that differ in what must be alike raise the same error, before any gradient is averaged.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.comm.gate import Passage, Row, digest
from dbrdist.comm.model import plan_for
from dbrdist.comm.reduction import Plan
from dbrdist.core.changes import Watch
from dbrdist.core.parameter import Parameter

_NUM_SAME = 5  # step, parameters, hyperparameters, which parameters are reduced, which are new
_RUNS, _SAMPLES, _WORKS, _STOP, _PLACE, _ENCLOSES = range(_NUM_SAME, _NUM_SAME + 6)


class Steps:
    """The headers of one optimizer's steps."""

    def __init__(self, comm: Any, optimizer: Any, settings: str = "") -> None:
        """``settings`` are further words that all ranks must have in common, lines with a break at their end."""
        self._comm = comm
        self._settings = settings
        self._optimizer = optimizer
        self._plan: Plan | None = None
        self._watch: Watch | None = None
        self._target: Any = None  # of which the watch speaks
        self._params_text = ""
        self._params_digest = self._runs_digest = 0
        self._values: Any = None
        self._values_text = ""
        self._values_digest = 0
        self._passage: Passage | None = None
        self._header: Header | None = None
        self._is_refused = False  # waiting for it has raised on all ranks
        self.late: list[tuple[str, Parameter]] = []  # parameters that wait for their first input

    def post(
        self,
        num_samples: int | None,
        works: bool,
        zero_fill: bool,
        new: Sequence[str] = (),
        encloses: bool = False,
    ) -> None:
        """Show this rank's header, without waiting for the others'.

        Args:
            num_samples: of this rank.
            works: whether this rank has a forward pass.
            zero_fill: of the optimizer.
            new: names of parameters that want values.
            encloses: whether the gradients come with it, if there is room for those that are there now.
        """
        self._look_at_parameters()
        enclosed = self._plan.collect() if encloses and self._plan is not None and self._fits() else ()
        self._look_at_values()
        row = [
            self._optimizer.t,
            self._params_digest,
            self._values_digest,
            zero_fill,
            digest("".join(new)) if new else 0,
            self._runs_digest,
            -1 if num_samples is None else int(num_samples),
            works,
            self._comm._stop_request,
            0 if self._plan is None else self._plan.place,
            bool(enclosed),
        ]
        with self._comm._gate.call("update") as call:
            words = self._in_words(zero_fill, new)
            call.post(row, num_same=_NUM_SAME, what="the same step", detail=words, enclosed=enclosed)
        self._passage, self._header, self._is_refused = call, None, False

    def meet(self) -> Passage:
        """The verb in which this rank waits for the others' headers, and reduces: ``with steps.meet() as call``."""
        assert self._passage is not None
        call: Passage = self._comm._gate.again(self._passage)
        return call

    def wait(self, call: Passage) -> Header:
        """The headers of all ranks."""
        if self._header is None:
            self._is_refused = True
            rows = call.wait()
            self._is_refused = False
            self._comm._stop_answers = rows[:, _STOP]
            self._header = Header(rows)
        return self._header

    def is_small(self) -> bool:
        """Whether the gradients fit into the header."""
        self._look_at_parameters()
        return self._fits()

    def _fits(self) -> bool:
        return self._plan is not None and self._comm._encloses([run.grad for run in self._plan.runs])

    def poll(self) -> Header | None:
        """The headers of all ranks if they are there already."""
        if self._header is None and self._passage is not None and self._passage.is_answered():
            with self.meet() as call:
                self.wait(call)
        return self._header

    def break_off(self, error: BaseException) -> None:
        """This rank has failed while gradients travelled, at another bucket than others maybe: nothing can follow.

        Where the headers disagreed, none travelled, and all ranks have raised.
        """
        assert self._passage is not None
        if not self._is_refused:
            self._passage.break_off(error)

    @property
    def place(self) -> tuple[str, int]:
        """The line of the call."""
        assert self._passage is not None
        return self._passage.place

    def plan(self) -> Plan | None:
        """A plan of what the header spoke of; None where the forward pass has changed the parameters since."""
        said = self._params_digest, self._plan
        self._look_at_parameters()
        return self._plan if said == (self._params_digest, self._plan) else None

    def current_plan(self) -> Plan:
        """The plan of what is updated now."""
        self._look_at_parameters()
        if self._plan is None:
            self._plan = plan_for(self._comm, [(name, p) for name, p in self._named_updated() if p.is_initialized])
        return self._plan

    def overlap(self, division: Any = None) -> Any:
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

    def is_current(self) -> bool:
        """False where a parameter, a link or a rule has changed since the last header, or the target is another."""
        return self._watch is not None and self._target is self._optimizer.target and self._watch.is_current()

    def _look_at_parameters(self) -> None:
        """Plan anew where a parameter, a link or a rule has changed."""
        if self.is_current():
            return
        target = self._target = self._optimizer.target
        named = list(target.namedparams())
        self.late = [(name, p) for name, p in named if not p.is_initialized]
        self._plan = None if self.late else plan_for(self._comm, self._named_updated())
        self._runs_digest = 0 if self._plan is None else self._plan.runs_digest
        self._params_text = "".join(f"{_describe(name, p)}\n" for name, p in named)
        self._params_digest = digest(self._params_text)
        params = list(dict.fromkeys(p for _, p in named))
        rules = [p.update_rule for p in params if p.update_rule is not None]
        self._watch = Watch([*target.links(), *params, *rules, *(rule.hyperparam for rule in rules)])

    def _look_at_values(self) -> None:
        """What the update does with the gradients: learning rate, hooks and their like."""
        actual = self._optimizer
        hyperparam = getattr(actual, "hyperparam", None)
        values = (tuple(hyperparam.own().values()) if hyperparam is not None else (), actual._loss_scale)
        hooks = [hook for named in (actual._hooks.pre, actual._hooks.post) for hook in named.values()]
        values = (*values, *(tuple(vars(hook).values()) for hook in hooks if _is_ours(hook)))
        if not _are_same(values, self._values):
            self._values = values
            self._values_text = _values_in_words(actual, hyperparam, hooks) + self._settings
            self._values_digest = digest(self._values_text)

    def _in_words(self, zero_fill: bool, new: Sequence[str]) -> Any:
        step, values, params = self._optimizer.t, self._values_text, self._params_text
        come = f"new parameters {', '.join(new)}\n" if new else ""
        return lambda: f"step {step}\nzero_fill {zero_fill}\n{values}{params}{come}"


class Header:
    """What all ranks showed."""

    def __init__(self, rows: Row) -> None:
        runs, self.counts, works, _, self.places, encloses = rows[:, _RUNS : _ENCLOSES + 1].T.tolist()
        self.same_runs = runs.count(runs[0]) == len(runs)
        self.is_placed = self.same_runs and self.places[0] != 0 and self.places.count(self.places[0]) == len(runs)
        self.is_enclosed = self.same_runs and all(encloses)  # the gradients of all ranks came with it
        self.workers = [rank for rank, does in enumerate(works) if does]  # ranks with a forward pass


def _is_updated(p: Parameter) -> bool:
    """All but the frozen ones, whose gradients nobody reads."""
    return p.update_rule is None or bool(p.update_rule.enabled)


def _describe(name: str, p: Parameter) -> str:
    what = f"{name} {tuple(p.shape)} {p.dtype.name}" if p.is_initialized else f"{name} (uninitialised)"
    if not _is_updated(p):
        what += " frozen"
    own = {} if p.update_rule is None else p.update_rule.hyperparam.own()
    return what + "".join(f" {key} {value}" for key, value in sorted(own.items()) if _is_plain(value))


def _values_in_words(actual: Any, hyperparam: Any, hooks: list[Any]) -> str:
    lines = [f"optimizer {type(actual).__name__}", f"loss scale {actual._loss_scale}"]
    if hyperparam is not None:
        lines += [f"{key} {_plain(value)}" for key, value in sorted(hyperparam.own().items()) if _is_plain(value)]
    for hook in hooks:
        if _is_ours(hook):
            own = (f" {key} {_plain(value)}" for key, value in sorted(vars(hook).items()) if _is_plain(value))
            lines.append(f"hook {type(hook).__name__}{''.join(own)}")
    return "".join(f"{line}\n" for line in lines)


def _is_ours(hook: Any) -> bool:
    """True for hooks that change gradients alike everywhere; a user's own may watch on one rank only."""
    return type(hook).__module__.startswith("dbrdist.") and hasattr(hook, "__dict__")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, numbers.Number, np.generic))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _are_same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except ValueError:  # an array among them
        return False
