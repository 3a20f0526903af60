"""Datasets as tables, and datasets made of datasets."""
