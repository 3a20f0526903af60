"""From a checked configuration to what changes the parameters: optimizer, hooks, schedules, updater."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from dbrdist.cli.builders.build import arguments
from dbrdist.cli.configuration import resolve
from dbrdist.cli.configuration import updates as u
from dbrdist.cli.configuration.derived import made_by, takes
from dbrdist.cli.configuration.document import KeyPath
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, number_at
from dbrdist.cli.configuration.settings import Custom
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import ConfigError, ScheduleError
from dbrdist.optimizers import schedules
from dbrdist.optimizers.schedules import Schedule
from dbrdist.training import StandardUpdater

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

# ---- the optimizer -----------------------------------------------------------------------------------------------


def optimizer(config: Config, origin: Origin, task: Link) -> Any:
    """Make the optimizer, set it up with the task, and add the hooks."""
    settings = config.optimizer
    if isinstance(settings, Custom):
        made = resolve.call(settings, ("optimizer",), origin)
        if not hasattr(made, "setup"):
            raise _mistake(origin, ("optimizer",), f"expected an optimizer, got {type(made).__name__}")
        if not isinstance(settings.schedule, u.Own) and not hasattr(made, "lr"):
            raise _mistake(origin, ("optimizer", "schedule"), f"{type(made).__name__} has no lr to set")
    else:
        made = made_by(settings)(**arguments(settings, "hooks", "schedule"))
    if config.lr_finder is not None and not hasattr(made, "lr"):
        raise _mistake(origin, ("lr_finder",), f"{type(made).__name__} has no learning rate to find")
    made.setup(task)
    if config.dtype in ("float16", "bfloat16") and hasattr(made, "use_fp32_update"):
        made.use_fp32_update()
    if not isinstance(config.loss_scale, str):
        made.set_loss_scale(config.loss_scale)
    elif config.dtype in ("float16", "mixed16") and hasattr(made, "loss_scaling"):
        made.loss_scaling()
    for i in range(len(settings.hooks)):
        _add_hook(made, config, origin, task, i)
    if config.zero:
        _check_divisible(made, config, origin, task)
    return made


def _check_divisible(made: GradientMethod, config: Config, origin: Origin, task: Link) -> None:
    """Refuse an optimizer whose state cannot be divided over ranks, on one rank too."""
    if not isinstance(made, GradientMethod):
        words = f"expected an optimizer with update rules, got {type(made).__name__}, which has no state to divide"
        raise _mistake(origin, ("zero",), words)
    try:
        made.check_divisible(list(task.params()))
    except ValueError as error:
        raise _mistake(origin, ("zero",), str(error)) from None


def over_ranks(config: Config, made: GradientMethod, comm: CommunicatorBase) -> Any:
    """The optimizer with gradients from all ranks, in the way that the configuration says."""
    compression = config.compression
    return create_multi_node_optimizer(
        made,
        comm,
        config.double_buffering,
        zero=config.zero,
        compression=None if compression.name == "none" else made_by(compression)(**arguments(compression)),
        accumulate=config.accumulate,
        local_steps=config.local_steps,
    )


def _add_hook(made: GradientMethod, config: Config, origin: Origin, task: Link, i: int) -> None:
    """Add the i-th hook; its name has the number, so that several of a kind may differ in group and rate."""
    settings, path = config.optimizer.hooks[i], ("optimizer", "hooks", i)
    if isinstance(settings, Custom):
        hook = resolve.call(settings, path, origin)
        if not callable(hook):
            raise _mistake(origin, path, f"expected a hook from {settings.name!r}, got {type(hook).__name__}")
    else:
        group = group_of(settings, task)
        if group is not None and not group:
            raise _mistake(origin, path, f"no parameter fits; there are {', '.join(_names(task))}")
        given = {"params": None if group is None else list(group.values()), "initial_lr": getattr(made, "lr", 1.0)}
        given = {name: value for name, value in given.items() if takes(settings, name)}
        hook = made_by(settings)(**arguments(settings, "only", "skip"), **given)
    made.add_hook(hook, f"{i}: {getattr(hook, 'name', settings.name)}")


def group_of(settings: Any, task: Link) -> dict[str, Parameter] | None:
    """The parameters that a hook is for, by path; None for all."""
    only, skip = getattr(settings, "only", ()), getattr(settings, "skip", ())
    if not only and not skip:
        return None
    named = {path.removeprefix("/predictor"): p for path, p in task.namedparams()}
    return {
        path: p
        for path, p in named.items()
        if (not only or any(fnmatchcase(path, pattern) for pattern in only))
        and not any(fnmatchcase(path, pattern) for pattern in skip)
    }


def _names(task: Link) -> list[str]:
    names = [path.removeprefix("/predictor") for path, _ in task.namedparams()]
    return names if len(names) <= 6 else [*names[:6], "..."]


def _mistake(origin: Origin, path: KeyPath, words: str) -> ConfigError:
    return ConfigError(f"{origin.where(path)}: {'.'.join(map(str, path))}: {words}")


# ---- schedules ---------------------------------------------------------------------------------------------------


_RATE: KeyPath = ("optimizer", "schedule")


class FollowedSchedule(NamedTuple):
    """What an ``extensions.FollowSchedule`` is made of."""

    schedule: Schedule
    target: str | Callable[[float], Any]  # a hyperparameter of the optimizer, or a function that takes the value
    refuse: Callable[[float], str | None] | None  # what is expected where a value will not do
    label: str


def scheduled(config: Config, origin: Origin, made: Any, task: Link | None) -> Iterator[FollowedSchedule]:
    """Each schedule with what it sets."""
    if not isinstance(config.optimizer.schedule, u.Own):
        schedule = make_schedule(config, origin, config.optimizer.schedule, _RATE, made.lr)
        yield FollowedSchedule(schedule, "lr", _refuse_negative, _label(origin, _RATE, config.optimizer.schedule))
    for i, item in enumerate(config.schedules):
        value = number_at(config, item.of)
        assert value is not None  # the configuration is checked
        target = _target(item.of, made, task)
        if target is None:
            raise _mistake(origin, ("schedules", i, "of"), f"{item.of} cannot change once the run has begun")
        path: KeyPath = ("schedules", i, "schedule")
        schedule = make_schedule(config, origin, item.schedule, path, value)
        limits = _Limits(config, item.of)
        values = [schedule(config.epochs * k / _NUM_LOOKS) for k in range(_NUM_LOOKS + 1)]
        for value in (min(values), max(values)):
            words = limits.refuse(value)
            if words is not None:
                words = f"{item.of} becomes {value:g} during the run, but expected {words}"
                raise _mistake(origin, path, words)
        yield FollowedSchedule(schedule, target, limits.refuse, _label(origin, path, item.schedule))


def _label(origin: Origin, path: KeyPath, settings: Any) -> str:
    return f"{origin.where(path)}: {'.'.join(map(str, path))}: {settings.name}"


def _refuse_negative(value: float) -> str | None:
    return "0 or more" if value < 0 else None


def make_schedule(config: Config, origin: Origin, settings: Any, path: KeyPath, value: float) -> Schedule:
    """A schedule that begins with `value`, as a function of the epochs done."""
    if isinstance(settings, Custom):
        after = _own_schedule(config, settings, path, origin)
    else:
        given = {"lr": value, "total": config.epochs}
        given = {name: number for name, number in given.items() if takes(settings, name)}
        common = u.ScheduleSettings.model_fields if isinstance(settings, u.ScheduleSettings) else ()
        own = {name: setting for name, setting in arguments(settings, *common).items() if setting != ()}
        if own.get("begin") == "warmup":
            own["begin"] = settings.warmup_epochs
        after = made_by(settings)(**own, **given)
    if not isinstance(settings, u.ScheduleSettings):
        return after
    whole = schedules.warmup(after, settings.warmup_epochs, settings.warmup_start)
    return schedules.by_whole_epochs(whole) if settings.whole_epochs else whole


_NUM_LOOKS = 200  # at a schedule, over the run


class _Limits:
    """The range that a key has in a configuration: an interval, of which the part between known values is known."""

    def __init__(self, config: Config, key: str):
        self._config = config
        self._key = key.split(".")
        self._lowest, self._highest = math.inf, -math.inf

    def refuse(self, value: float) -> str | None:
        """What is expected where a value will not do."""
        if self._lowest <= value <= self._highest:
            return None
        try:
            Config.model_validate(_with(self._config.model_dump(mode="json"), self._key, float(value)))
        except ValidationError as error:
            words = error.errors()[0]["msg"].lower()
            return words.removeprefix("expected ").removeprefix("input should be ")
        self._lowest, self._highest = min(self._lowest, value), max(self._highest, value)
        return None


def _with(data: Any, key: list[str], value: float) -> Any:
    """Plain data with one number replaced; its own schedule is left out."""
    place: Any = data
    for part in key[:-1]:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[key[-1]] = value
    return {**data, "schedules": []}


def _own_schedule(config: Config, settings: Custom, path: KeyPath, origin: Origin) -> Schedule:
    """The user's function of the epoch, after a look at its values from the first to the last of the run."""
    function = resolve.find(settings, path, origin)
    for k in range(_NUM_LOOKS + 1):
        epoch = round(float(config.epochs * k / _NUM_LOOKS), 6)
        value = resolve.call(settings, path, origin, epoch)
        if not isinstance(value, int | float | np.number) or not _is_finite(value):
            got = "an integer too large for a float" if isinstance(value, int) else f"{value!r:.60}"
            raise _mistake(origin, path, f"expected a finite number from {settings.name}({epoch}), got {got}")
        if path == _RATE and value < 0:
            raise _mistake(origin, path, f"expected a rate of 0 or more from {settings.name}({epoch}), got {value!r}")

    def follow(epochs: float) -> Any:
        try:
            return function(epochs, **settings.args)
        except (Exception, SystemExit) as error:
            words = f"calling it for epoch {epochs:.6g} failed: {resolve.last_line(error)}"
            raise ScheduleError(f"{_label(origin, path, settings)}: {words}") from error

    return follow


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError):  # an integer too large for a float; a complex number
        return False


def _target(key: str, made: Any, task: Any) -> str | Callable[[float], Any] | None:
    """What a scheduled number is set by; None where there is nothing of that name."""
    section, *inner = key.split(".")
    name = inner[-1] if inner else section
    if section == "loss_scale":
        return made.set_loss_scale  # type: ignore[no-any-return]
    if section == "loss":
        arguments_of_loss = getattr(task.loss, "keywords", {})
        return (lambda value: arguments_of_loss.update({name: value})) if name in arguments_of_loss else None
    if inner[0] == "hooks":
        hooks = {**made._hooks.pre, **made._hooks.post}
        hook = next((hook for label, hook in hooks.items() if label.startswith(f"{inner[1]}: ")), None)
        return (lambda value: setattr(hook, name, value)) if hasattr(hook, name) else None
    return (lambda value: setattr(made.hyperparam, name, value)) if name in made.hyperparam.own() else None


# ---- the step ----------------------------------------------------------------------------------------------------


def updater(
    config: Config, origin: Origin, iterator: Any, made: Any, convert: Any, device: DeviceSpec | None,
) -> StandardUpdater:  # fmt: skip
    """What does a step: the user's own, called with iterator, optimizer, converter and device, or the standard one."""
    settings = config.updater
    if settings is None:
        return StandardUpdater(iterator, made, convert, input_device=device, capture=config.graph)
    if config.graph:
        raise _mistake(origin, ("graph",), "the updater is your own; let it call StandardUpdater(..., capture=True)")
    own = resolve.call(settings, ("updater",), origin, iterator, made, convert, device)
    if not isinstance(own, StandardUpdater):
        raise _mistake(
            origin, ("updater",), f"expected a StandardUpdater from {settings.name!r}, got {type(own).__name__}"
        )
    return own


def warn_of_graph(config: Config, comm: CommunicatorBase) -> None:
    """Say that steps of virtual workers are not captured, where that is asked for."""
    if config.graph and not comm.rank:
        warn(
            "the step is not captured as a CUDA graph and runs eagerly: virtual workers make several passes in each "
            "step; leave graph out, or give the batch without virtual_workers"
        )
