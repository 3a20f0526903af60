"""Differentiable operations. They take arrays or Variables and always return Variables."""

from dbrdist.functions.activation import relu

__all__ = ["relu"]
