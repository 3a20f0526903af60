"""Settings of configurations that follow from the signature of what they make.

A parameter with a description in its annotation is a setting; its limit is that of the annotation::

    def __init__(self, lr: Annotated[float, rate, "Learning rate per step."] = 0.01) -> None:
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from dbrdist.cli.configuration.settings import Settings
from dbrdist.core.array.types import Module
from dbrdist.core.names.limits import Limit, settings_of

_MADE_BY: dict[type[Settings], Callable[..., Any]] = {}


def derived(
    made_by: Callable[..., Any],
    name: str | None = None,
    title: str | None = None,
    *,
    base: type[Settings] = Settings,
    is_named: bool = True,
    words: str = "",
    **own: tuple[Any, Any],
) -> type[Settings]:
    """The settings of a component: a field for each setting in the signature of the class or function.

    `own` are pairs of a type and a default (... for none) for what configurations write in another way, or what they
    have besides. `title` is the name of the settings in schemas, where it is not that of the class. `words` say what
    they are where the docstring says more than a configuration needs. A key of its own has no `name`.
    """
    name = name or name_of(made_by)
    fields: dict[str, Any] = {}
    if is_named:
        fields["name"] = (Annotated[Literal[name], Field(description=f"`{name}`.")], ...)
    for one in settings_of(made_by):
        kind, default = own.get(one.name) or _field(one.kind, one.limit, one.default)
        fields[one.name] = (Annotated[kind, Field(description=one.description)], default)
    fields.update((field, both) for field, both in own.items() if field not in fields)
    words = words or " ".join((inspect.getdoc(made_by) or "").partition("\n\n")[0].split())
    title = title or (made_by.__name__ if isinstance(made_by, type) else name.title().replace("_", ""))
    made: type[Settings] = create_model(title, __base__=base, __doc__=words, __module__=__name__, **fields)
    _MADE_BY[made] = made_by
    return made


def made_by(settings: Settings | type[Settings]) -> Callable[..., Any]:
    """The class or function that the settings are those of."""
    cls = settings if isinstance(settings, type) else type(settings)
    return next(_MADE_BY[base] for base in cls.__mro__ if base in _MADE_BY)


def takes(settings: Settings | type[Settings], parameter: str) -> bool:
    """Whether what the settings make has a parameter that the run gives, such as `params` of a hook."""
    return parameter in inspect.signature(made_by(settings)).parameters


def name_of(made_by: Callable[..., Any]) -> str:
    """The name in configurations: `momentum_sgd` of MomentumSGD, or what the class says in `config_name`."""
    own = vars(made_by).get("config_name")
    return own or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", made_by.__name__).lower()


def all_derived(module: Module, of: Callable[[type], bool], base: Callable[[type], type[Settings]]) -> tuple[Any, ...]:
    """The settings of all classes that a module exports and for which `of` is true."""
    found = [getattr(module, name) for name in module.__all__]
    classes = sorted((cls for cls in found if isinstance(cls, type) and of(cls)), key=name_of)
    return tuple(derived(cls, base=base(cls)) for cls in classes)


def _field(kind: Any, limit: Limit | None, default: Any) -> tuple[Any, Any]:
    """The type of a field and its default, ... for none; a sequence that may be missing is an empty one."""
    made = field_type(kind, limit)
    if default is inspect.Parameter.empty:
        return made, ...
    if default is not None:
        return made, default
    (inner,) = (one for one in typing.get_args(kind) if one is not type(None))
    return (made | None, None) if inner in (int, float, str) else (made, ())


def field_type(kind: Any, limit: Limit | None) -> Any:
    """The type of a field, within the limit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (one for one in inner if one is not type(None))
        return field_type(kind, limit)
    if origin is tuple and Ellipsis not in inner:
        return Annotated[tuple[tuple(field_type(one, limit) for one in inner)], Field(strict=False)]
    if origin in (tuple, Sequence, list) or (isinstance(origin, type) and issubclass(origin, Iterable)):
        return Annotated[tuple[field_type(inner[0], limit), ...], Field(strict=False)]
    if limit is None or kind not in (int, float):
        return kind
    bounds = (limit.configured or limit).bounds()
    return Annotated[kind, Field(**bounds)] if bounds else kind
