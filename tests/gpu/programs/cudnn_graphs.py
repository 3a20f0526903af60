"""Builds cuDNN's graphs without a GPU, and prints what became of each: JSON, one graph a line.

The frontend and cuDNN are the real ones; the device is a table of properties, and libcuda.so.1 has to be one that
answers without a device, as test_cudnn_graphs.py makes it:

PYTHONPATH=.:tests/gpu LD_LIBRARY_PATH=FOLDER python tests/gpu/programs/cudnn_graphs.py h200 float16

Convolutions are those that dbrdist's own kernels ask for in a step of ResNet-50, on arrays of the stand-in.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time

import counting
import cudnn as frontend  # before the stand-in puts cuDNN of the host in its place
import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import optimizers, using_config
from dbrdist.core.array import backend, random
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.gpu import cudnn, cudnn_attention, cudnn_convolution
from dbrdist.kernels.unsupported import Unsupported
from dbrdist.models import resnet

BATCH = 128

# As cuDNN's serialized properties name them: what the three have in common, and in what they differ.
_COMMON = {
    "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "cudaDeviceId": 0, "driverVer": 13000,
}  # fmt: skip
_HOPPER = {"multiProcessorCount": 132, "maxSharedMemoryPerBlockOptin": 232448, "smClockRateKHz": 1980000,
           "deviceVer": 900}  # fmt: skip
DEVICES = {
    "a100": {
        "multiProcessorCount": 108, "maxSharedMemoryPerBlockOptin": 166912, "smClockRateKHz": 1410000,
        "deviceVer": 800, "memClockRateKHz": 1593000, "l2CacheSize": 40 << 20, "totalGlobalMem": 80 << 30,
        "deviceName": "NVIDIA A100-SXM4-80GB",
    },
    "h100": {
        **_HOPPER, "memClockRateKHz": 2619000, "l2CacheSize": 50 << 20, "totalGlobalMem": 80 << 30,
        "deviceName": "NVIDIA H100 80GB HBM3",
    },
    "h200": {
        **_HOPPER, "memClockRateKHz": 3201000, "l2CacheSize": 60 << 20, "totalGlobalMem": 150_754_820_096,
        "deviceName": "NVIDIA H200",
    },
}  # fmt: skip

# Topic: type of the activations, and the configuration of the step.
STEPS = {
    "float32": ("float32", {"dtype": np.dtype("f")}),
    "tf32": ("float32", {"dtype": np.dtype("f"), "use_cudnn_tensor_core": "always"}),
    "float16": ("float16", {"dtype": "mixed16"}),
    "bfloat16": ("bfloat16", {"dtype": "mixedbf16"}),
    "fused": ("float16", {"dtype": "mixed16", "fused_convolutions": True}),
}
ATTENTION = {"attention-float16": "float16", "attention-bfloat16": "bfloat16"}
SIZES = [(128, 128, 64), (2048, 2048, 64), (512, 512, 128), (35, 35, 40), (64, 96, 64)]  # queries, keys, width


class Noted(cudnn.Graph):
    """A graph for the bench's device; what becomes of it is noted."""

    options: dict[str, object] = {}  # of the device
    row: dict[str, object] = {}  # what is known of the graphs that come next
    rows: list[dict[str, object]] = []

    def __init__(self, dtype):
        super().__init__(dtype, **self.options)

    def build(self, notes):
        row = self.row | {"deterministic": "NONDETERMINISTIC" in notes.unwanted}
        start = time.perf_counter()
        try:
            run = super().build(notes)
        except Unsupported as e:
            self.rows.append(row | {"error": str(e)})
            raise
        plan = {"plans": self.graph.get_execution_plan_count(), "workspace": self.graph.get_workspace_size()}
        self.rows.append(row | plan | {"seconds": time.perf_counter() - start})
        return run


def choose(device):
    """Let graphs be built for a device by the real cuDNN, on arrays of the stand-in."""
    counting.install()
    sys.modules["cudnn"] = frontend
    properties = frontend.create_device_properties(json.dumps(_COMMON | DEVICES[device]))
    Noted.options = {"device_property": properties, "sm_version": DEVICES[device]["deviceVer"] // 10}


@contextlib.contextmanager
def configured(options):
    """The configuration with these options."""
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            stack.enter_context(using_config(name, value))
        yield


class Described:
    """In the place of a graph: nothing is built."""

    def __init__(self, dtype):
        self.dtype = dtype

    def build(self, notes):
        return lambda *addresses: None


def descriptions(topic):
    """What the kernels describe in two steps of ResNet-50, in this order and each once."""
    found = {}

    def describe(graph, *description):
        assert graph.dtype == STEPS[topic][0]
        found[description] = True
        return graph

    real = cudnn_convolution.Graph, cudnn_convolution.describe
    cudnn_convolution.Graph, cudnn_convolution.describe = Described, describe
    with configured(STEPS[topic][1]), np.errstate(all="ignore"):
        place = dbrdist.get_device("@cupy:0")
        net = resnet.ResNet50(1000).to_device(place)
        optimizer = optimizers.MomentumSGD(0.001).setup(net)
        x = place.send(np.empty((BATCH, 3, 224, 224), backend.as_dtype(STEPS[topic][0])))
        t = place.xp.zeros(BATCH, np.int32)
        for _ in range(2):  # batch normalization has seen by the second that a ReLU follows
            loss = F.softmax_cross_entropy(net(x), t)
            net.cleargrads()
            loss.backward()
            optimizer.update()
    cudnn_convolution.Graph, cudnn_convolution.describe = real
    return list(found)


def fused(of_a_step):
    """Also those that another network may ask for: each kind of fused graph of each convolution but the stem's."""
    of_blocks = [tuple(rest) for direction, *rest, _ in of_a_step if direction == "sums"]
    kinds = [("sums", False), ("sums", True), ("weight", True)]
    return list(dict.fromkeys([*of_a_step, *((kind, *rest, r) for rest in of_blocks for kind, r in kinds)]))


def build_convolutions(topic):
    """All graphs of a step, with and without engines that add in any order."""
    name, options = STEPS[topic]
    dtype = backend.as_dtype(name)
    known = descriptions(topic)
    for direction, x, W, y, geometry, *rectifies in fused(known) if topic == "fused" else known:
        Noted.row = {
            "kind": "rectified " * any(rectifies) + direction, "x": x, "W": W, "y": y, "stride": geometry[0],
        }  # fmt: skip
        for is_deterministic in (False, True):
            with configured({**options, "cudnn_deterministic": is_deterministic}), contextlib.suppress(Unsupported):
                graph = Noted(dtype)
                cudnn_convolution.describe(graph, direction, x, W, y, geometry, *rectifies)
                graph.build(cudnn_convolution.notes(dtype))


def build_attention(topic):
    """Forward and backward graphs of attention, as the kernels plan them."""
    cudnn.Graph = Noted
    xp, dtype = backend.import_cupy(), backend.as_dtype(ATTENTION[topic])
    flags = itertools.product(SIZES, *[(False, True)] * 4)
    for (queries, keys, width), is_causal, drops, is_merged, is_deterministic in flags:
        if (is_causal and queries != keys) or not (is_merged or queries == SIZES[0][0]):
            continue
        q, k, v = (xp.empty((4, 8, length, width), dtype) for length in (queries, keys, keys))
        drop = random.next_draw(4 * 8 * queries, keys), 1 << 15, 2.0
        Noted.row = {"kind": "attention", "size": (queries, keys, width), "causal": is_causal, "drops": drops}
        Noted.row |= {"merged": is_merged}
        with configured({"cudnn_deterministic": is_deterministic}), contextlib.suppress(Unsupported):
            cudnn_attention.fused_attention(q, k, v, drop if drops else (None, 0, 1.0), 0.125, is_causal, is_merged)


def build_wrong(topic):
    """A convolution of 64 channels whose result has 56."""
    Noted.row = {"kind": topic}
    images = 8, 64, 14, 14
    graph = Noted(np.dtype("e"))
    with contextlib.suppress(Unsupported):
        cudnn_convolution.describe(graph, "forward", images, (64, 64, 1, 1), (8, 56, 14, 14), ConvGeometry())
        graph.build(cudnn_convolution.notes(np.dtype("e")))


def main():
    device, topic = sys.argv[1:]
    choose(device)
    start = time.perf_counter()
    build = build_wrong if topic == "wrong" else build_attention if topic in ATTENTION else build_convolutions
    build(topic)
    for row in Noted.rows:
        print(json.dumps(row, default=str))
    print(f"{frontend.__version__}, cuDNN {frontend.backend_version_string()}: {len(Noted.rows)} graphs, "
          f"{time.perf_counter() - start:.1f} seconds", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
