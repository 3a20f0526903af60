"""Tuples whose fields have names, as `typing.NamedTuple` makes them, for what each rank loads at its start.

`typing` would cost each rank's supervisor 0.7 MB, and `collections.namedtuple` compiles a function for each class.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter

    class NamedTuple(tuple):
        """The base of such a class."""

        __slots__ = ()

        def __init_subclass__(cls):
            cls._fields = tuple(cls.__annotations__)
            cls._field_defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}
            for at, name in enumerate(cls._fields):
                setattr(cls, name, _tuplegetter(at, ""))

        def __new__(cls, *values, **named):
            if len(values) > len(cls._fields) or not named.keys() <= set(cls._fields[len(values) :]):
                raise TypeError(
                    f"{cls.__name__} takes {', '.join(cls._fields)}; got {len(values)} and {', '.join(named)}"
                )
            found = {**cls._field_defaults, **named}
            rest = cls._fields[len(values) :]
            if len(found.keys() & set(rest)) < len(rest):
                raise TypeError(f"{cls.__name__} needs {', '.join(name for name in rest if name not in found)}")
            return tuple.__new__(cls, (*values, *[found[name] for name in rest]))

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in zip(self._fields, self))})"

        def _asdict(self):
            return dict(zip(self._fields, self))

        def _replace(self, **named):
            return type(self)(**{**self._asdict(), **named})
