"""Functions of ChainerMN that return something else under Chainer's paths than natively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.comm import functions

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable


class _One(tuple[Any, ...]):
    """A tuple of one Variable, as in Chainer 7, with its attributes: Chainer 6 returned the Variable itself."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself and by NumPy, of a tuple
            raise AttributeError(name)
        return getattr(self[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self[0], name, value)


def pseudo_connect(delegate_variable: Variable, *actual_variables: Variable) -> tuple[Any, ...]:
    """As :func:`dbrdist.comm.functions.pseudo_connect`, but a tuple of one for one Variable, too."""
    ys = functions.pseudo_connect(delegate_variable, *actual_variables)
    return ys if isinstance(ys, tuple) else _One((ys,))
