"""What is done about a probable mistake of a program: a warning at the line of the user, or an error.

A program of Chainer's time, run by ``dbrdist.compat``, may do what Chainer accepted: there the error is a warning.
"""

from __future__ import annotations

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.user_line import warn_user
from dbrdist.errors import UsageWarning


def warn(words: str) -> None:
    """Warn at the line of the user's program that led here; Python shows a warning once for each line."""
    warn_user(words, UsageWarning)


def refuse(error: Exception) -> None:
    """Raise ``error``; in a program of Chainer, which accepted this, warn instead."""
    if not as_chainer[0]:
        raise error
    warn(f"{error} (accepted, as Chainer did)")


def given_a_class(where: str, value: type, what: str) -> TypeError:
    """The error where a class was given and an instance is meant."""
    return TypeError(f"{where}: expected {what}, got the class {value.__name__}; write {value.__name__}(...)")
