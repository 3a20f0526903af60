"""Import paths of version b1df9a7, whose modules have been in packages since: programs and pickles that name them work.

A path that no file serves is looked up here, and is then the very module that has moved.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from dbrdist.core.usage.foreign_names import hint

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # which load a third as much as all of this package
    Loader = MetaPathFinder = object

# Package of now: its modules as they were called; `old=new` where the name has changed, too.
_MODULES = {
    "core.array": "arrays=array_operations backend config elementwise pages random scipy_parts spans sums thread_pools",
    "core.tape": (
        "backprop call checks differentiate fusion gradient_check graph=function_node named_errors node ops "
        "rows=elementwise_table type_check variable walk"
    ),
    "core.model": "chain changes=versions device_resident flat link link_hook parameter reporter",
    "core.update": "optimizer part=fused_update update_rule",
    "core.files": "dataset_root hdf5 regular=regular_file safetensors serializer",
    "core.chainer": "computational_graph function sparse static_graph",
    "core.names": "missing_names runtime_info",
    "kernels": "keys=dispatch",
    "kernels.reference": "numpy_ numpy_normalization numpy_softmax",
    "kernels.cpu": (
        "columns onednn onednn_blocks onednn_convolution onednn_elementwise onednn_executor onednn_finite "
        "onednn_float16 onednn_inference onednn_layer_norm onednn_matmul onednn_normalization onednn_ops "
        "onednn_pooling onednn_softmax onednn_taps"
    ),
    "kernels.gpu": "cuda_normalization cuda_ops cuda_pooling cuda_source cudnn cudnn_convolution",
    "kernels.small_arrays": "small small_loops small_numpy",
    "datasets.loading": "base convert dali files memory order prefetch rings serial transfer workers",
    "datasets.image": "augment folder images index index_format mixing pixels scan shards tar transforms",
    "datasets.public": "cifar digits download mnist npz pickled ptb svhn text unpickle zipped",
    "datasets.table": "columns combine split tables tabular",
    "cli.output": "beats console folder lock provenance refuse warned words",
    "cli.configuration": "components config=schema document extend load resolve settings updates",
    "cli.builders": "assemble build build_updates memory plan preflight probe task weights",
    "cli.running": "meter resume run",
    "cli.inspection": "chart commands predict report",
    "comm.transport": "cable=sockets environment host_memory hosts message mpi record=call_log verdict=disagreement",
    "comm.protocol": "agree arguments codec=wire_type gate objects observations pair primitives settings",
    "comm.failure": "abort channel deadlock exit_status judge watch",
    "comm.gradients": (
        "arenas=shared_gradients compression courier=communication_thread leaves=tree_sum model overlap pipeline "
        "reduction=reduction_plan sharding speed=bandwidth"
    ),
    "comm.communicators": (
        "communicator cores create mailbox nccl processes=mpi_communicator shared_memory threads two_levels world"
    ),
    "comm.steps": (
        "background=reduction_handle buffering carried=step_state handed_on=delegation header joint_steps "
        "late=lazy_parameters optimizer virtual way=step_options worker_state"
    ),
    "comm.data": "audit datasets evaluator iterators virtual_evaluator",
    "comm.run": "checkpoints extensions parameter_audit snapshots trace",
    "compat.numpy_1": "numpy_names",
}
# Chainer's paths of modules that have another place here: `from dbrdist.variable import Variable`.
_OF_CHAINER = {
    "array": "backend random",
    "chainer": "computational_graph function",
    "model": "link link_hook reporter",
    "tape": "function_node gradient_check variable",
    "update": "optimizer",
}


def _table() -> dict[str, str]:
    moved = {}
    for package, names in _MODULES.items():
        room = package.partition(".")[0]
        for name in names.split():
            old, _, new = name.partition("=")
            moved[f"dbrdist.{room}.{old}"] = f"dbrdist.{package}.{new or old}"
    for package, names in _OF_CHAINER.items():
        moved.update({f"dbrdist.{name}": f"dbrdist.core.{package}.{name}" for name in names.split()})
    return moved


MOVED = _table()


class _Loader(Loader):
    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._module = importlib.import_module(self._path)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = MOVED.get(fullname)
        if new is None and fullname.startswith("dbrdist.") and not _is_only_asked():
            _refuse_foreign(*fullname.rpartition(".")[::2])
        return None if new is None else importlib.machinery.ModuleSpec(fullname, _Loader(new))


def _is_only_asked() -> bool:
    """Whether ``importlib.util.find_spec`` asks if there is such a module: it gives None for one that there is not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


def _refuse_foreign(parent: str, name: str) -> None:
    """Raise for a module of PyTorch, such as ``dbrdist.nn``, with what to import instead."""
    ours = hint("", name) if parent == "dbrdist" else ""
    if ours:
        raise ModuleNotFoundError(f"No module named {parent + '.' + name!r}; {ours}", name=f"{parent}.{name}")


def serve() -> None:
    """From now on the old paths can be imported. They are asked for last: other imports take no longer."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


_loading = threading.local()  # whether this thread is within `loaded` already, and holds what others wait for
_MOST_TRIES = 200


def loaded(path: str) -> ModuleType:
    """The module; again where Python ends an import that would wait for another thread's, which waits for this one."""
    is_within, tries = getattr(_loading, "is_on", False), 1
    _loading.is_on = True
    try:
        while True:
            try:
                return importlib.import_module(path)
            except RuntimeError as error:
                if type(error).__name__ != "_DeadlockError" or is_within or tries == _MOST_TRIES:
                    raise
            tries += 1
            time.sleep(0.01)  # for the other one to go on
    finally:
        _loading.is_on = is_within
