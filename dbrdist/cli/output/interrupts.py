"""Ctrl-C in commands of click, which would print an empty line for it."""

from __future__ import annotations

import click


class Interrupted(BaseException):
    """A KeyboardInterrupt on its way past click."""


class _PassedOn:
    def invoke(self, context: click.Context) -> int:
        try:
            return super().invoke(context)  # type: ignore[misc]
        except KeyboardInterrupt:
            raise Interrupted from None


class Command(_PassedOn, click.Command):
    """A command whose Ctrl-C is raised as Interrupted."""


class Group(_PassedOn, click.Group):
    """A group of commands whose Ctrl-C is raised as Interrupted."""
