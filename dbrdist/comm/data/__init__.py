"""Datasets, iterators and evaluators that several ranks share, and the audit that no example is lost."""
