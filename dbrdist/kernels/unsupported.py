"""What a provider says of arguments that it does not serve."""

from __future__ import annotations


class Unsupported(Exception):
    """A provider has no implementation for this case; another one serves it."""
