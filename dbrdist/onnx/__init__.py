"""ONNX files of networks: ``dbrdist.onnx.export(model, x, path)``."""

from dbrdist.onnx.export import OperatorError, export

__all__ = ["OperatorError", "export"]
