"""cuDNN through NVIDIA's frontend (package nvidia-cudnn-frontend, versions 1.23 to 1.32): handles and graphs.

The package is imported at first use. A handle belongs to one thread and one device, and works on CuPy's current stream;
a graph is one operation with its shapes, types and layouts, built for a handle's device and run on bare addresses.
Workspace comes from CuPy's pool, whose blocks are reused in the order of the stream.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from dbrdist.core.array import backend
from dbrdist.kernels.cpu.onednn import Unavailable, Unsupported

Extents = Sequence[int]

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}


class _Library:
    """The frontend, and CuPy's functions of the hot path."""

    def __init__(self) -> None:
        try:
            self.cudnn: Any = importlib.import_module("cudnn")
            version = self.cudnn.backend_version()
        except Exception as e:  # a missing package, or whatever the frontend raises where there is no libcudnn
            raise Unavailable(f"{type(e).__name__}: {e}") from None
        if version < 90000:
            raise Unavailable(f"expected cuDNN 9 or newer, found {version}")
        cupy = backend.import_cupy()
        self.stream: Callable[[], Any] = cupy.cuda.get_current_stream
        self.alloc: Callable[[int], Any] = cupy.cuda.alloc
        self.device: Callable[[], int] = cupy.cuda.runtime.getDevice


_library: _Library | None = None
_reason: str | None = None  # why there is none
_lock = threading.Lock()


def library() -> _Library:
    """The library, loaded at the first call; raises Unavailable, always for the same reason."""
    global _library, _reason
    with _lock:
        if _reason is not None:
            raise Unavailable(_reason)
        if _library is None:
            try:
                _library = _Library()
            except Unavailable as e:
                _reason = str(e)
                raise
        return _library


# ---- handles


class Handle:
    """cuDNN's context for one thread on one device, and the stream on which it works."""

    __slots__ = ("raw", "stream")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.stream = -1


_idle: dict[int, list[Handle]] = {}  # by device: of threads that have ended; destroying one would wait for the device


class _Owned(dict[int, Handle]):
    """The handles of a thread by device."""

    def __del__(self, idle: dict[int, list[Handle]] = _idle) -> None:
        for device, handle in self.items():  # at the end of the program the module's names may be gone
            idle.setdefault(device, []).append(handle)


class _ThreadHandles(threading.local):
    def __init__(self) -> None:
        self.owned = _Owned()


_local = _ThreadHandles()


def handle() -> Handle:
    """This thread's handle for its current device."""
    lib = library()
    device = lib.device()
    found = _local.owned.get(device)
    if found is None:
        spare = _idle.get(device)
        found = _local.owned[device] = spare.pop() if spare else Handle(lib.cudnn.create_handle())
    return found


# ---- graphs


class Notes:
    """Which of cuDNN's engines may serve."""

    def __init__(self, allows_tensor_cores: bool, is_deterministic: bool) -> None:
        self.unwanted = ["REDUCED_PRECISION_REDUCTION"]
        if not allows_tensor_cores:
            self.unwanted += ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
        if is_deterministic:
            self.unwanted.append("NONDETERMINISTIC")


class Graph:
    """One operation: described by calls of ``tensor`` and of the frontend's ``pygraph``, finished by ``build``."""

    def __init__(self, dtype: Any, **options: Any) -> None:
        """``options`` stand for the handle where there is no GPU, as in tests."""
        lib = library()
        self.library, self.type = lib, getattr(lib.cudnn.data_type, TYPES[dtype.name])
        self.handle = None if options else handle()
        if self.handle is not None:
            options = {"handle": self.handle.raw}
        wide = lib.cudnn.data_type.FLOAT
        self.graph = lib.cudnn.pygraph(
            io_data_type=self.type, intermediate_data_type=wide, compute_data_type=wide, **options
        )
        self.operands: list[Any] = []

    def tensor(self, shape: Extents, strides: Extents, is_wide: bool = False) -> Any:
        """An operand, of float32 if ``is_wide``, which takes its place in the order of addresses."""
        kind = self.library.cudnn.data_type.FLOAT if is_wide else self.type
        t = self.graph.tensor(dim=list(shape), stride=list(strides), data_type=kind)
        self.operands.append(t)
        return t

    def number(self) -> Any:
        """An operand of one float32 in host memory, which is read at each call."""
        wide = self.library.cudnn.data_type.FLOAT
        t = self.graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=wide, is_pass_by_value=True)
        self.operands.append(t)
        return t

    def image(self, shape: Extents) -> Any:
        """A channels-last operand (N, C, H, W)."""
        return self.tensor(shape, image_strides(shape))

    def rectified(self, x: Any, channels: int) -> Any:
        """The ReLU of ``x`` times a factor plus a summand for each channel, which are the next two operands."""
        vector = 1, channels, 1, 1
        scaled = self.graph.scale(input=x, scale=self.image(vector))
        return self.graph.relu(input=self.graph.bias(input=scaled, bias=self.image(vector)))

    def result(self, t: Any, shape: Extents, strides: Extents | None = None, is_wide: bool = False) -> None:
        """Let ``t`` be a result, channels-last unless there are strides; its address comes next."""
        strides = image_strides(shape) if strides is None else strides
        kind = self.library.cudnn.data_type.FLOAT if is_wide else self.type
        t.set_output(True).set_dim(list(shape)).set_stride(list(strides)).set_data_type(kind)
        self.operands.append(t)

    def build(self, notes: Notes) -> Callable[..., None]:
        """A function of the operands' addresses; raises Unsupported where cuDNN has no engine."""
        cudnn, graph = self.library.cudnn, self.graph
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes([getattr(cudnn.numerical_note, n) for n in notes.unwanted])
            graph.check_support()
            graph.build_plans()
        except Exception as e:  # of several types, which differ between versions
            raise Unsupported(f"cuDNN: {e}") from None
        return self.runner()

    def runner(self) -> Callable[..., None]:
        """What runs the graph on addresses."""
        uids = [t.get_uid() for t in self.operands]
        num_bytes = self.graph.get_workspace_size()
        run, order = _fastest_call(self.graph, uids)
        handle, lib = self.handle, self.library
        if handle is None:
            return lambda *addresses: None

        pick = itemgetter(*order)  # of two operands or more
        get_stream, alloc, raw = lib.stream, lib.alloc, handle.raw

        def execute(*addresses: int) -> None:
            stream = get_stream().ptr
            if stream != handle.stream:
                lib.cudnn.set_stream(raw, stream)
                handle.stream = stream
            if num_bytes:
                workspace = alloc(num_bytes)
                run([*pick(addresses)], workspace.ptr, raw)
            else:
                run([*pick(addresses)], 0, raw)

        return execute


def _fastest_call(graph: Any, uids: list[int]) -> tuple[Callable[..., None], list[int]]:
    """A function of addresses, workspace and handle, and the operands' order that it wants.

    The call with addresses alone exists in some versions, and takes half the time of the one with a dictionary.
    """
    by_addresses = getattr(graph, "_execute_with_ptrs", None)
    if by_addresses is not None:
        graph._prepare_variant_pack_template()
        sorted_uids = list(graph._get_variant_pack_uids_sorted())
        if sorted(sorted_uids) == sorted(uids):
            return by_addresses, [uids.index(u) for u in sorted_uids]

    def by_names(addresses: list[int], workspace: int, raw: Any) -> None:
        graph.execute(dict(zip(uids, addresses)), workspace, raw)

    return by_names, list(range(len(uids)))


def image_strides(shape: Extents) -> tuple[int, ...]:
    """Strides in elements of channels-last memory."""
    _, c, h, w = shape
    return h * w * c, 1, w * c, c


def require(*arrays: Any) -> None:
    """Raise Unsupported unless these are CuPy arrays that are not empty, of one type that cuDNN takes here."""
    for a in arrays:
        if not backend.is_on_gpu(a) or not a.size or a.dtype != arrays[0].dtype or a.dtype.name not in TYPES:
            raise Unsupported("other arrays, empty ones, several types or other types")
        place = backend.place_of(a)
        if place is None or place[0] != place[1]:
            raise Unsupported("memory of another device")
