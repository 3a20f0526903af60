"""Hooks that look at every function's call: time, memory, values. Each is used as ``with TimerHook() as hook:``."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.function_hooks.gpu import CUDAProfileHook as CUDAProfileHook
from dbrdist.function_hooks.gpu import CUDAProfileRanges as CUDAProfileRanges
from dbrdist.function_hooks.gpu import CupyMemoryProfileHook as CupyMemoryProfileHook
from dbrdist.function_hooks.printing import PrintHook as PrintHook
from dbrdist.function_hooks.timer import TimerHook as TimerHook

__getattr__ = _explained(__name__)
