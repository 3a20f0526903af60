"""Functions of ChainerMN that return something else under Chainer's paths than natively."""

from __future__ import annotations

from typing import Any

from dbrdist.comm import functions


def pseudo_connect(delegate_variable: Any, *actual_variables: Any) -> tuple[Any, ...]:
    """As :func:`dbrdist.comm.functions.pseudo_connect`, but a tuple of one for one Variable, too."""
    ys = functions.pseudo_connect(delegate_variable, *actual_variables)
    return ys if isinstance(ys, tuple) else (ys,)
