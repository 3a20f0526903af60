"""Hyperparameters: values of an optimizer, which the rules of its parameters inherit and may replace."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dbrdist.core.model.versions import note_change
from dbrdist.core.names.limits import Limit, limits_of, number_of
from dbrdist.core.usage.mistakes import refuse, warn
from dbrdist.errors import CheckpointError

if TYPE_CHECKING:
    from typing import TypeAlias

    from dbrdist.core.array.types import Array
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.update.optimizer import GradientMethod, Optimizer

    HyperparameterValue: TypeAlias = float | np.generic | Array | str | tuple[float, ...] | None

Class = TypeVar("Class", bound=type)

# The optimizers that were set up, by their hyperparameters: they check what is assigned.
owners: weakref.WeakKeyDictionary[Hyperparameter, weakref.ref[GradientMethod]]


class Hyperparameter:
    """Values of an optimizer, such as ``lr``. A rule reads from its optimizer what it does not set itself."""

    _changed_at: int | None = None
    _has_arrays = False  # whether one of NumPy's arrays or numbers was ever among the values set here

    def __init__(self, parent: Hyperparameter | None = None) -> None:
        self.__dict__["_parent"] = parent

    @property
    def parent(self) -> Hyperparameter | None:
        """The source of values that are not set here."""
        return self._parent

    def __getattr__(self, name: str) -> Any:
        parent = self.__dict__.get("_parent")
        if parent is None or name.startswith("__"):
            raise AttributeError(f"no hyperparameter named {name!r}; there are {sorted(self.get_dict())}")
        return getattr(parent, name)

    def __setattr__(self, name: str, value: HyperparameterValue) -> None:
        if owners and (optimizer := self._owner()) is not None and name != "_changed_at":
            optimizer.check_hyperparameter(self, name, value)
        self.put(name, value)

    def _owner(self) -> GradientMethod | None:
        root = self
        while root._parent is not None:
            root = root._parent
        found = owners.get(root)
        return None if found is None else found()

    def put(self, name: str, value: HyperparameterValue) -> None:
        """Set a value that was checked."""
        if type(value) is not float:
            value = number_of(value)
        self.__dict__[name] = value
        if isinstance(value, (np.ndarray, np.generic)):
            self.__dict__["_has_arrays"] = True
        if self._parent is not None and name != "_changed_at":
            note_change(self)  # a rule with values of its own no longer runs with its neighbours

    @property
    def has_own(self) -> bool:
        """Whether any value is set here."""
        return len(self.__dict__) > 1 + ("_changed_at" in self.__dict__) + ("_has_arrays" in self.__dict__)

    def own(self) -> dict[str, Any]:
        """The values set here."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_parent", "_changed_at", "_has_arrays")}

    def get_dict(self) -> dict[str, Any]:
        """All values, also the parent's."""
        parent = self.__dict__.get("_parent")
        return {**(parent.get_dict() if parent is not None else {}), **self.own()}

    def in_numbers(self) -> Hyperparameter:
        """The values as formulas take them: arrays of one element, and NumPy's numbers, as numbers of Python.

        NumPy would compute with a float64 one in float64, and CuPy takes no array of the host. An array that is written
        to has its new value here.
        """
        at: Hyperparameter | None = self
        while at is not None and not at._has_arrays:
            at = at._parent
        if at is None:
            return self
        new = Hyperparameter()
        new.__dict__.update((name, _in_number(value)) for name, value in self.get_dict().items())
        return new

    def __repr__(self) -> str:
        return f"Hyperparameter({', '.join(f'{k}={v}' for k, v in sorted(self.get_dict().items()))})"


def _in_number(value: Any) -> Any:
    is_one = isinstance(value, (np.ndarray, np.generic)) and value.size == 1
    return value.item() if is_one else value


owners = weakref.WeakKeyDictionary()


class HyperparameterProxy:
    """An optimizer's attribute that lives in its hyperparameters: ``lr = HyperparameterProxy('lr')``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: GradientMethod | None, owner: type | None = None) -> Any:
        return self if obj is None else getattr(obj.hyperparam, self.name)

    def __set__(self, obj: GradientMethod, value: HyperparameterValue) -> None:
        if type(value) is not float or not 0.0 < value < 1.0:  # which is what nearly all of them are
            check_assigned(obj, self.name, value)
        obj.hyperparam.put(self.name, value)


def check_assigned(optimizer: Optimizer, name: str, value: HyperparameterValue) -> None:
    """Refuse what is no number; warn of a number outside the limit that the constructor declares."""
    cls: type = type(optimizer)
    limit = hyperparameter_limits(cls).get(name)
    error = None if limit is None else limit.refusal(type(optimizer).__name__, name, value)
    if error is not None:
        if isinstance(error, TypeError) or value != value:
            refuse(error)
        else:
            warn(str(error))


@functools.cache
def hyperparameter_limits(cls: type) -> dict[str, Limit]:
    """The limits of an optimizer's hyperparameters by name, as the constructors of its classes declare them."""
    limits: dict[str, Limit] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("dbrdist.") and isinstance(base.__dict__.get("__init__"), FunctionType):
            limits.update({declared.name: declared.limit for declared in limits_of(base.__dict__["__init__"])})
    return limits


_OF_ALL = ("lr", "alpha", "momentum", "beta1", "beta2", "rho", "eps", "eta", "gamma")  # names of hyperparameters


def refuse_state_of_another(optimizer: GradientMethod, saved: AbstractSerializer) -> None:
    """Entries of equal names, such as a momentum, mean other numbers to another optimizer."""
    others = [name for name in _OF_ALL if has_entry(saved, name)]
    if others:
        refuse(CheckpointError(
            f"{type(optimizer).__name__}: the saved state is that of another optimizer: it has the hyperparameters "
            f"{', '.join(others)}, expected {', '.join(optimizer.hyperparam.own())}; take the same optimizer, or load "
            "the network alone"
        ))  # fmt: skip


def has_entry(serializer: AbstractSerializer, name: str) -> bool:
    """Whether a serializer that loads finds a value under this name."""
    try:
        return serializer(name, None) is not None
    except KeyError:
        return False


def read_quickly(*names: str) -> Callable[[Class], Class]:
    """Decorate a class whose properties of these names only return an attribute: each step of ranks reads them.

    CPython 3.11 calls a getter in 160 ns, and reads the attribute for it in 30.
    """

    def decorate(cls: Class) -> Class:
        for name in names:
            written: property = vars(cls)[name]
            getter: Any = written.fget
            (attribute,) = getter.__code__.co_names
            setattr(cls, name, property(operator.attrgetter(attribute), written.fset, written.fdel, written.__doc__))
        return cls

    return decorate
