"""Commands of click whose errors go past click.

click takes not only a KeyboardInterrupt for Ctrl-C but an EOFError too, which a cut-off file of data raises; it ends
without a word at an OSError of a broken pipe, such as that of a connection from which examples come; and its own Exit,
raised by somebody's code, is the end of a run that has not failed.
"""

from __future__ import annotations

from typing import Any

import click


class _OnItsWay(BaseException):
    """An error that click is not to see."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error


class _PassedOn:
    _of_click: tuple[type[Exception], ...] = ()

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)  # type: ignore[misc]
        except self._of_click:
            raise
        except BaseException as error:
            raise _OnItsWay(error) from None


class Command(_PassedOn, click.Command):
    """A command for :func:`call`."""


class Group(_PassedOn, click.Group):
    """A group of commands for :func:`call`."""

    _of_click = (click.exceptions.Exit,)  # after the help of one of them


def call(command: Command | Group, arguments: list[str] | None = None, **options: Any) -> Any:
    """What the command returns, with arguments of `click.Command.main`; an error of the command as it was raised."""
    try:
        return command.main(arguments, standalone_mode=False, **options)
    except _OnItsWay as passed:
        error = passed.error
    raise error  # out here, so that it keeps its own context
