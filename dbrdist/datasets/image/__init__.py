"""Datasets of image files: index, decoding, transforms, mixing, tar shards."""
