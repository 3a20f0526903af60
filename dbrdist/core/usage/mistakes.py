"""What is done about a probable mistake of a program: a warning at the line of the user, or an error.

A program of Chainer's time, run by ``dbrdist.compat``, may do what Chainer accepted: there the error is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import Array
from dbrdist.core.array.user_line import warn_user
from dbrdist.errors import CheckpointError, UsageWarning

_MISSING_INIT = "Link.__init__() has not been called."  # Chainer's words, to the letter
_CALL_IT = "In __init__, call super().__init__() first"
NO_INIT = f"{_MISSING_INIT} {_CALL_IT}"


def warn(words: str) -> None:
    """Warn at the line of the user's program that led here; Python shows a warning once for each line."""
    warn_user(words, UsageWarning)


def refuse(error: Exception) -> None:
    """Raise ``error``; in a program of Chainer, which accepted this, warn instead."""
    if not as_chainer[0]:
        raise error
    warn(f"{error} (accepted, as Chainer did)")


def warn_of_arrays(arrays: Sequence[Array], where: str, ours: str) -> None:
    """Warn of a few arrays side by side, such as (x, t), where examples are meant."""
    if not 2 <= len(arrays) <= 4 or not all(isinstance(a, np.ndarray) and a.ndim for a in arrays):
        return
    sizes, kinds = {len(a) for a in arrays}, {(a.shape, a.dtype) for a in arrays}
    if len(sizes) == 1 and max(sizes) > len(arrays) and len(kinds) > 1:  # examples of one dataset are alike
        warn(f"{where}: {len(arrays)} arrays side by side are {len(arrays)} examples; write {ours}")


def given_a_class(where: str, value: type, what: str) -> TypeError:
    """The error where a class was given and an instance is meant."""
    return TypeError(f"{where}: expected {what}, got the class {value.__name__}; write {value.__name__}(...)")


def missing_init() -> RuntimeError:
    """The error of a link whose class does not call ``__init__`` of its base."""
    error = RuntimeError(_MISSING_INIT)
    if not as_chainer[0]:  # whose programs may look for the words alone
        error.add_note(_CALL_IT)
    return error


def refuse_no_values(parameter: str, is_strict: bool) -> None:
    """A file has no values for a parameter that has some, which would stay."""
    words = (
        f"{parameter}: the file has no values for this parameter, since the network that was saved had seen no input; "
        "save it after its first batch"
    )
    if is_strict:
        refuse(CheckpointError(words))
    else:
        warn(words)
