"""Converters of functions to ONNX operators."""
