"""Whole networks as links."""
