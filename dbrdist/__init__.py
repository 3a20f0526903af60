"""Deep learning with the vocabulary of Chainer, made for training on many nodes.

``import dbrdist`` brings the core. The rooms above it, such as ``dbrdist.functions`` and ``dbrdist.comm``, are loaded
when they are first named.
"""

from typing import TYPE_CHECKING, Any

from dbrdist import errors
from dbrdist.core.array import backend, random
from dbrdist.core.array.backend import (
    get_array_module,
    get_array_types,
    get_cpu_array_types,
    get_device,
    is_arrays_compatible,
    using_device,
)
from dbrdist.core.array.config import (
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
from dbrdist.core.model import link as link
from dbrdist.core.model import link_hook as link_hook
from dbrdist.core.model import reporter as reporter
from dbrdist.core.model.chain import Chain, ChainList, Sequential
from dbrdist.core.model.device_resident import DeviceResident
from dbrdist.core.model.link import Link
from dbrdist.core.model.link_hook import LinkHook
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.reporter import DictSummary, Reporter, Summary, get_current_reporter, report, report_scope
from dbrdist.core.names import missing_names, moved
from dbrdist.core.tape import function_node as function_node
from dbrdist.core.tape import variable as variable
from dbrdist.core.tape.backprop import backward, grad
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode, get_function_hooks
from dbrdist.core.tape.variable import Variable, as_array, as_variable
from dbrdist.core.update import optimizer as optimizer
from dbrdist.core.update.optimizer import GradientMethod, Optimizer
from dbrdist.core.update.update_rule import UpdateRule

if TYPE_CHECKING:
    from dbrdist import serializers
    from dbrdist.core.chainer import computational_graph
    from dbrdist.core.chainer import function as function
    from dbrdist.core.chainer.function import Function, FunctionAdapter
    from dbrdist.core.chainer.static_graph import static_code, static_graph
    from dbrdist.core.files.serializer import AbstractSerializer, Deserializer, Serializer
    from dbrdist.core.names.runtime_info import print_runtime_info
    from dbrdist.core.tape import gradient_check as gradient_check
    from dbrdist.core.tape.differentiate import jvp, vjp

__version__ = "0.1.0"

# Set to True, it silences the warnings of experimental functions.
disable_experimental_feature_warning = False

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
    "onnx",
    "optimizer_hooks",
    "optimizers",
    "serializers",
    "testing",
    "training",
    "utils",
)

# Names of the root that other modules have, which are loaded when they are first named.
_MADE_ELSEWHERE = {
    "AbstractSerializer": "core.files.serializer",
    "Deserializer": "core.files.serializer",
    "Distribution": "distribution",
    "Function": "core.chainer.function",
    "FunctionAdapter": "core.chainer.function",
    "Initializer": "initializers",
    "Serializer": "core.files.serializer",
    "cross_entropy": "distribution",
    "jvp": "core.tape.differentiate",
    "kl_divergence": "distribution",
    "load": "training.runs",
    "print_runtime_info": "core.names.runtime_info",
    "profile": "function_hooks.profiler",
    "register_kl": "distribution",
    "should_use_cudnn": "backends.cuda",
    "should_use_cudnn_tensor_core": "backends.cuda",
    "static_code": "core.chainer.static_graph",
    "static_graph": "core.chainer.static_graph",
    "vjp": "core.tape.differentiate",
}
_MODULES_ELSEWHERE = {
    "computational_graph": "core.chainer.computational_graph",
    "function": "core.chainer.function",
    "gradient_check": "core.tape.gradient_check",
}

moved.serve()


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_NAMED or name == "kernels":  # for which Python asks at `from dbrdist import kernels`
        return moved.loaded(f"dbrdist.{name}")
    if name in _MODULES_ELSEWHERE:
        return globals().setdefault(name, moved.loaded(f"dbrdist.{_MODULES_ELSEWHERE[name]}"))
    if name in _MADE_ELSEWHERE:
        return globals().setdefault(name, getattr(moved.loaded(f"dbrdist.{_MADE_ELSEWHERE[name]}"), name))
    raise missing_names.error("dbrdist", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_WHEN_NAMED, *_MADE_ELSEWHERE, *_MODULES_ELSEWHERE})


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
