"""Deep learning with the vocabulary of Chainer, made for training on many nodes.

``import dbrdist`` brings the core. The rooms above it, such as ``dbrdist.functions`` and ``dbrdist.comm``, are loaded
when they are first named.
"""

import importlib
import sys
from typing import Any

from dbrdist import errors, serializers
from dbrdist.core import (
    backend,
    computational_graph,
    function,
    gradient_check,
    link,
    link_hook,
    missing_names,
    optimizer,
    random,
    reporter,
    variable,
)
from dbrdist.core import graph as function_node
from dbrdist.core.backend import (
    get_array_module,
    get_array_types,
    get_cpu_array_types,
    get_device,
    is_arrays_compatible,
    using_device,
)
from dbrdist.core.backprop import backward, grad
from dbrdist.core.chain import Chain, ChainList, Sequential
from dbrdist.core.config import (
    DebugMode,
    config,
    force_backprop_mode,
    get_compute_mode,
    get_dtype,
    global_config,
    is_debug,
    mixed16,
    mixedbf16,
    no_backprop_mode,
    set_debug,
    using_config,
)
from dbrdist.core.device_resident import DeviceResident
from dbrdist.core.differentiate import jvp, vjp
from dbrdist.core.function import Function, FunctionAdapter
from dbrdist.core.graph import FunctionHook, FunctionNode, get_function_hooks
from dbrdist.core.link import Link
from dbrdist.core.link_hook import LinkHook
from dbrdist.core.optimizer import GradientMethod, Optimizer
from dbrdist.core.parameter import Parameter
from dbrdist.core.reporter import (
    DictSummary,
    Reporter,
    Summary,
    get_current_reporter,
    report,
    report_scope,
)
from dbrdist.core.runtime_info import print_runtime_info
from dbrdist.core.serializer import AbstractSerializer, Deserializer, Serializer
from dbrdist.core.static_graph import static_code, static_graph
from dbrdist.core.update_rule import UpdateRule
from dbrdist.core.variable import Variable, as_array, as_variable

__version__ = "0.1.0"

_LOADED_WHEN_NAMED = (
    "backends",
    "comm",
    "dataset",
    "datasets",
    "distribution",
    "distributions",
    "function_hooks",
    "functions",
    "initializers",
    "iterators",
    "link_hooks",
    "links",
    "models",
    "optimizer_hooks",
    "optimizers",
    "testing",
    "training",
    "utils",
)

# Names of the root that rooms above the core have.
_MADE_ABOVE = {
    "Distribution": "distribution",
    "Initializer": "initializers",
    "cross_entropy": "distribution",
    "kl_divergence": "distribution",
    "load": "training.runs",
    "register_kl": "distribution",
    "should_use_cudnn": "backends.cuda",
    "should_use_cudnn_tensor_core": "backends.cuda",
}

# Chainer's paths of modules that have another place here: `from dbrdist.serializers import load_npz`.
for _module in (
    backend,
    computational_graph,
    function,
    gradient_check,
    link,
    link_hook,
    optimizer,
    random,
    reporter,
    variable,
):
    sys.modules[_module.__name__.replace(".core.", ".")] = _module
sys.modules["dbrdist.function_node"] = function_node


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_NAMED:
        return importlib.import_module(f"dbrdist.{name}")
    if name in _MADE_ABOVE:
        return getattr(importlib.import_module(f"dbrdist.{_MADE_ABOVE[name]}"), name)
    raise missing_names.error("dbrdist", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_WHEN_NAMED, *_MADE_ABOVE})


__all__ = [
    "AbstractSerializer",
    "Chain",
    "ChainList",
    "DebugMode",
    "Deserializer",
    "DeviceResident",
    "DictSummary",
    "Function",
    "FunctionAdapter",
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
    "computational_graph",
    "config",
    "errors",
    "force_backprop_mode",
    "get_array_module",
    "get_array_types",
    "get_compute_mode",
    "get_cpu_array_types",
    "get_current_reporter",
    "get_device",
    "get_dtype",
    "get_function_hooks",
    "global_config",
    "grad",
    "gradient_check",
    "is_arrays_compatible",
    "is_debug",
    "jvp",
    "mixed16",
    "mixedbf16",
    "no_backprop_mode",
    "print_runtime_info",
    "random",
    "report",
    "report_scope",
    "serializers",
    "set_debug",
    "static_code",
    "static_graph",
    "using_config",
    "using_device",
    "vjp",
]
