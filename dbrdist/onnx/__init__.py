"""ONNX files of networks: ``dbrdist.onnx.export(model, x, path)``."""

from dbrdist.onnx.conversion import OperatorError
from dbrdist.onnx.export import export

__all__ = ["OperatorError", "export"]
