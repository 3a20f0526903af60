"""Deep learning with the vocabulary of Chainer, made for training on many nodes."""

from dbrdist import errors
from dbrdist.core import backend, gradient_check, random
from dbrdist.core import serializer as serializers
from dbrdist.core.backend import get_array_module, get_device, using_device
from dbrdist.core.backprop import backward, grad
from dbrdist.core.chain import Chain, ChainList, Sequential
from dbrdist.core.config import (
    DebugMode,
    config,
    force_backprop_mode,
    get_dtype,
    global_config,
    is_debug,
    no_backprop_mode,
    set_debug,
    using_config,
)
from dbrdist.core.graph import FunctionHook, FunctionNode, get_function_hooks
from dbrdist.core.link import Link
from dbrdist.core.link_hook import LinkHook
from dbrdist.core.optimizer import GradientMethod, Optimizer, UpdateRule
from dbrdist.core.parameter import Parameter
from dbrdist.core.reporter import (
    DictSummary,
    Reporter,
    Summary,
    get_current_reporter,
    report,
    report_scope,
)
from dbrdist.core.serializer import AbstractSerializer, Deserializer, Serializer
from dbrdist.core.variable import Variable, as_array, as_variable
from dbrdist.links import initializers

__version__ = "0.1.0"

__all__ = [
    "AbstractSerializer",
    "Chain",
    "ChainList",
    "DebugMode",
    "Deserializer",
    "DictSummary",
    "FunctionHook",
    "FunctionNode",
    "GradientMethod",
    "Link",
    "LinkHook",
    "Optimizer",
    "Parameter",
    "Reporter",
    "Sequential",
    "Serializer",
    "Summary",
    "UpdateRule",
    "Variable",
    "as_array",
    "as_variable",
    "backend",
    "backward",
    "config",
    "errors",
    "force_backprop_mode",
    "get_array_module",
    "get_current_reporter",
    "get_device",
    "get_dtype",
    "get_function_hooks",
    "global_config",
    "grad",
    "gradient_check",
    "initializers",
    "is_debug",
    "no_backprop_mode",
    "random",
    "report",
    "report_scope",
    "serializers",
    "set_debug",
    "using_config",
    "using_device",
]
