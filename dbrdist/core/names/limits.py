"""Limits of settings, declared once: in the signature of what takes them.

::

    def __init__(self, lr: Annotated[float, not_negative, "learning rate"] = 0.01, n_layers: int = 1) -> None:

``limits_of(function)`` reads them back, so that checks in Python, schemas and tables of documentation have one source.
An argument annotated ``int`` must be an integer; the text in ``Annotated`` is its description.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np

from dbrdist.core.tape.checks import ArgumentError, OperandTypeError, expected
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import refuse, warn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import ParamSpec, TypeVar

    from dbrdist.core.array.types import Number
    from dbrdist.core.tape.variable import Operand

    P = ParamSpec("P")
    R = TypeVar("R")


class Limit:
    """What a number must be: ``words`` for people, bounds by the names that schemas use, and whether it is whole."""

    def __init__(
        self,
        words: str,
        *,
        gt: float | None = None,
        ge: float | None = None,
        lt: float | None = None,
        le: float | None = None,
        is_whole: bool = False,
        is_for_axes: bool = False,  # a sequence of such numbers, one for each axis, is one too
        may_be_infinite: bool = False,
        configured: Limit | None = None,  # in configurations, where it is narrower: Python takes what Chainer took
        words_of_type: str = "",  # for people, where a value is no such number at all; "" for ``words``
        is_of_chainer: bool = False,  # Chainer refuses what is outside, too, or has nothing of the kind
        hint: str = "",  # what was probably meant
    ) -> None:
        self.words = words
        self.gt, self.ge, self.lt, self.le = gt, ge, lt, le
        self.is_whole, self.is_for_axes, self.may_be_infinite = is_whole, is_for_axes, may_be_infinite
        self.configured = configured
        self.words_of_type = words_of_type
        self.is_of_chainer, self.hint = is_of_chainer, hint

    def but(self, **changes: float | str | Limit | None) -> Limit:
        """The same limit with changes."""
        return type(self)(**{**vars(self), **changes})

    def bounds(self) -> dict[str, float]:
        """The bounds that there are, as arguments of pydantic's ``Field`` or keys of a JSON schema."""
        return {name: b for name in ("gt", "ge", "lt", "le") if (b := getattr(self, name)) is not None}

    def holds(self, number: float) -> bool:
        """Whether a number is within the limit; NaN never is."""
        return (
            number == number
            and (self.may_be_infinite or not math.isinf(number))
            and (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )

    def refusal(self, where: str, name: str, value: Any) -> ArgumentError | None:
        """The error for a value outside the limit; None for one within."""
        if self.is_for_axes and hasattr(value, "__next__"):
            return None  # what an iterator gives is seen once, by whoever uses it
        if (
            self.is_for_axes
            and hasattr(value, "__len__")
            and not isinstance(value, str)
            and getattr(value, "ndim", None) != 0
        ):
            return next((e for x in value if (e := self.refusal(where, name, x))), None)
        number = _whole(value) if self.is_whole else _number(value)
        if number is None:
            is_number = self.is_whole and _number(value) is not None
            hint = "write a // b for a quotient that is an integer" if is_number else ""
            if isinstance(value, str) and value.lower() == "same":
                hint = "for outputs as large as the input write (ksize - 1) // 2, with stride 1 and an odd ksize"
            if hasattr(value, "cleargrads") or hasattr(value, "gi_frame"):  # a network, or its parameters
                hint = f"the network goes to setup: {where}(...).setup(model)" if where[:1].isupper() else ""
            return OperandTypeError(where, name, self.words_of_type or self.words, _shown(value), hint)
        return None if self.holds(number) else expected(where, name, self.words, str(value))


class Switch(Limit):
    """True or False, or 1, 0 or None for them; anything else was meant for another argument."""

    def refusal(self, where: str, name: str, value: Any) -> ArgumentError | None:
        if value is None or _number(value) in (0, 1):
            return None
        return OperandTypeError(where, name, self.words, _shown(value), self.hint)


class OrAll(Limit):
    """A limit of a number of things, for which -1 means all."""

    def holds(self, number: float) -> bool:
        return number == -1 or super().holds(number)


number = Limit("a finite number")
any_number = Limit("a number", may_be_infinite=True)
positive = Limit("a number above 0", gt=0)
not_negative = Limit("a number of 0 or more", ge=0)
threshold = Limit("a number of 0 or more", ge=0, may_be_infinite=True)
fraction = Limit("a number from 0 to below 1", ge=0, lt=1)
part = Limit("a number above 0 and at most 1", gt=0, le=1)
share = Limit("a number from 0 to 1", ge=0, le=1)
whole = Limit("an integer", is_whole=True)
count = Limit("an integer of 1 or more", ge=1, is_whole=True, configured=Limit("", ge=1, le=2**31 - 1))
count_or_all = OrAll("an integer of 1 or more, or -1 for all", ge=1, is_whole=True, configured=count.configured)
count_or_zero = Limit("an integer of 0 or more", ge=0, is_whole=True)
rate = Limit("a number of 0 or more", ge=0, configured=positive)
decay = Limit("a number from 0 to 1", ge=0, le=1, configured=fraction)
distances = Limit("a number of 0 or more", ge=0, is_for_axes=True, may_be_infinite=True)
margins = Limit("a number above 0", gt=0, may_be_infinite=True, is_of_chainer=True)
level = Limit("a finite number", configured=not_negative)
exponent = Limit("a finite number", configured=positive)
levels = Limit("numbers", is_for_axes=True, may_be_infinite=True, configured=not_negative)
largest = Limit("a number of 0 or more", ge=0, may_be_infinite=True, configured=positive)
counts = Limit("integers of 1 or more", ge=1, is_whole=True, is_for_axes=True, configured=count.configured)
sizes = Limit("an integer, or a tuple of integers", is_whole=True, is_for_axes=True)

Whole: TypeAlias = int | None
Sizes: TypeAlias = int | Sequence[int] | None  # one for all axes, or one for each
_BY_ANNOTATION = {"int": whole, "int | None": whole, "Whole": whole, "Sizes": sizes}


def _at_least(least: int, limit: Limit) -> Limit:
    comma = "," if limit.is_for_axes else ""
    words = f"{limit.words}{comma} of {least} or more"
    return limit.but(words=words, words_of_type=limit.words, ge=least)


# What arguments of these names mean in the constructors of links: their kind is that of the annotation.
_LEAST = {
    **dict.fromkeys(
        ("in_size", "out_size", "in_channels", "out_channels", "size", "n_units", "n_inputs", "n_hidden", "left_size",
         "right_size", "in_out_size", "outsize", "pad"), 0
    ),
    **dict.fromkeys(
        ("ksize", "stride", "dilate", "groups", "n_layers", "n_heads", "channel_multiplier", "pool_size"), 1
    ),
}  # fmt: skip
_OF_FLOATS = {
    **dict.fromkeys(("eps", "scale"), not_negative),
    "dropout": fraction,
    **dict.fromkeys(("c_ratio", "h_ratio"), share),
    "decay": share,
    "rmax": Limit("a number of 1 or more", ge=1, may_be_infinite=True),
    "dmax": threshold,
}  # fmt: skip
_SWITCH = Switch("True or False")
# Arguments that are switches wherever a constructor has them: a number there is most probably one of something else.
_SWITCHES = {
    "repeat": _SWITCH.but(hint="processes are n_processes=..., and a trainer's trigger says how many epochs"),
    "shuffle": _SWITCH.but(hint="a seed is seed=..."),
}
_LEVELS = frozenset({"verbose"})  # how much is said is a number elsewhere
_COUNTED = frozenset(name for name, least in _LEAST.items() if not least) - {"pad"}
_BY_NAME: dict[tuple[str, str], Limit] = {
    **dict.fromkeys(
        (("bool", "nobias"), ("bool", "offset_nobias"), ("bool", "deform_nobias")),
        _SWITCH.but(hint="the values of W are initialW, those of b are initial_bias"),
    ),
    **{(kind, name): _at_least(n, limit) for kind, limit in _BY_ANNOTATION.items() for name, n in _LEAST.items()},
    **{("float", name): limit for name, limit in _OF_FLOATS.items()},
}


def _whole(value: int) -> int | None:
    """An integer of Python or NumPy as a Python integer; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _number(value: Any) -> float | None:
    """A number, or an array or Variable of one element, as a float; None for anything else."""
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e300 or isinstance(value, float) else math.inf
    if isinstance(value, (str, bytes, complex)) or value is None:
        return None
    try:
        return float(value.item() if getattr(value, "size", 0) == 1 else value)
    except (TypeError, ValueError, AttributeError):
        return None


def _shown(value: str | Sequence[float] | None) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"


class Declared(typing.NamedTuple):
    """The limit of one argument: its name, its place among the positional ones, and whether None is allowed."""

    name: str
    place: int
    limit: Limit
    is_optional: bool
    description: str


@functools.cache
def limits_of(function: Callable[..., object]) -> tuple[Declared, ...]:
    """The limits that the signature of a function declares, one for each argument that has one."""
    found = []
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        limit, description = _declared(parameter.name, parameter.annotation, inspect.unwrap(function))
        kind = str(parameter.annotation).removeprefix("Annotated[").partition(",")[0]
        if limit is None and kind in ("bool", "bool | None") and parameter.name not in _LEVELS:
            limit = _SWITCHES.get(parameter.name, _SWITCH)
        if limit is not None:
            at = -1 if parameter.kind is parameter.KEYWORD_ONLY else place
            is_optional = parameter.default is None or kind.endswith(" | None") or kind in ("Whole", "Sizes")
            found.append(Declared(parameter.name, at, limit, is_optional, description))
    return tuple(found)


def _declared(name: str, annotation: Any, function: Callable[..., object]) -> tuple[Limit | None, str]:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if (text, name) in _BY_NAME and function.__module__.startswith("dbrdist.links."):
        return _BY_NAME[text, name], ""
    if text in _BY_ANNOTATION:
        return _BY_ANNOTATION[text], ""
    metadata = getattr(_annotated(annotation, function), "__metadata__", ())
    limit = next((x for x in metadata if isinstance(x, Limit)), None)
    return limit, next((x for x in metadata if isinstance(x, str)), "")


def _annotated(annotation: Any, function: Callable[..., object]) -> Any:
    """An annotation that is text as what it stands for, where it is an ``Annotated`` or the name of one."""
    if isinstance(annotation, str):
        if annotation.startswith("Annotated["):
            return eval(annotation, {**function.__globals__, "Annotated": Annotated})
        return function.__globals__.get(annotation)
    return annotation


class Setting(typing.NamedTuple):
    """An argument with a description: a setting, which configurations and pages of documentation have too."""

    name: str
    kind: Any  # its type, without the limit and the description
    limit: Limit | None
    default: object  # inspect.Parameter.empty where it must be given
    description: str


def settings_of(made_by: Callable[..., object]) -> tuple[Setting, ...]:
    """The settings of a class or a function; where a class passes on ``**settings``, its base's by keyword too."""
    function = made_by.__init__ if isinstance(made_by, type) else made_by  # type: ignore[misc]
    found, passes_on = [], False
    for parameter in inspect.signature(function).parameters.values():
        passes_on = passes_on or parameter.kind is parameter.VAR_KEYWORD
        annotation = _annotated(parameter.annotation, inspect.unwrap(function))
        limit, description = _declared(parameter.name, annotation, inspect.unwrap(function))
        if description:
            kind = typing.get_args(annotation)[0]
            found.append(Setting(parameter.name, kind, limit, parameter.default, description))
    if passes_on and isinstance(made_by, type):
        named = inspect.signature(made_by.__base__.__init__).parameters  # type: ignore[misc]
        inherited = settings_of(made_by.__base__) if made_by.__base__ is not None else ()
        found += [one for one in inherited if named[one.name].kind is inspect.Parameter.KEYWORD_ONLY]
    return tuple(found)


def _counts_in_chainer(value: object) -> bool:
    return type(value) is tuple or (isinstance(value, (float, np.floating)) and float(value).is_integer())


def check(declared: tuple[Declared, ...], where: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse arguments outside their limits.

    What must be an integer and is none is refused under ``dbrdist.compat`` too, as Chainer did; but for quotients such
    as 4.0, which passed for the number of channels, and a tuple of sizes, which passed until the array was made.
    """
    for name, place, limit, is_optional, _ in declared:
        if name in kwargs:
            value = kwargs[name]
        elif 0 <= place < len(args):
            value = args[place]
        else:
            continue
        if value is None and is_optional:
            continue
        error = limit.refusal(where, name, value)
        if error is None:
            if limit.is_whole and name in _COUNTED and type(value) is int and value == 0:
                warn(f"{where}: {name} is 0, so that it has no elements to compute with")
            continue
        if limit.is_of_chainer or (limit.is_whole and isinstance(error, TypeError) and not _counts_in_chainer(value)):
            raise error
        refuse(error)


def make_plain(declared: tuple[Declared, ...], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Put Python's integers into the places of NumPy's, whose sums and products wrap around in 8 or 16 bits, and the
    number of a Variable into its place: formulas of arrays would leave it out."""
    for name, place, limit, _, _ in declared:
        if name in kwargs:
            kwargs[name] = _plain(kwargs[name]) if limit.is_whole else number_of(kwargs[name])
        elif 0 <= place < len(args):
            args[place] = _plain(args[place]) if limit.is_whole else number_of(args[place])


def number_of(value: R) -> R | float:
    """The number of a Variable that has one; anything else as it is."""
    return value.array.item() if isinstance(value, Variable) and value.size == 1 else value


def _plain(value: object) -> object:
    if type(value) is int or value is None:
        return value
    if type(value) is tuple or type(value) is list:
        plain = [_plain(n) for n in value]
        return tuple(plain) if type(value) is tuple else plain
    if isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "iu":
        return int(value)
    return int(value) if isinstance(value, np.integer) else value


@functools.cache
def _by_name(function: Callable[..., object]) -> dict[str, Declared]:
    return {one.name: one for one in limits_of(function)}


def within(function: Callable[..., object], **values: Operand | Number | Sequence[float] | None) -> None:
    """Refuse values outside the limits that the signature of a function declares; for functions that are called often.

    ``within(huber_loss, delta=delta)`` stands in the function itself, where its arguments are looked at.
    """
    declared = _by_name(function)
    for name, value in values.items():
        one = declared[name]
        error = None if value is None and one.is_optional else one.limit.refusal(function.__name__, name, value)
        if error is not None and (one.limit.is_whole or one.limit.is_of_chainer):
            raise error
        if error is not None:
            refuse(error)


def within_limits(function: Callable[P, R]) -> Callable[P, R]:
    """A function that refuses arguments outside the limits of its signature; for those that are called rarely."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check(limits_of(function), function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return call
