"""As much of cuDNN's frontend as dbrdist uses, for host memory: convolutions and attention by definition, in float64.

What cuDNN demands is demanded here: sizes that agree, steps in their order, a handle that works on the stream of the
moment, memory for what is computed on the way. An engine of a kind that was not deselected may serve, and then does
with the numbers what it does there: it rounds, or it is not the same twice.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import threading
import types

import ml_dtypes
import numpy as np

_TYPES = {"FLOAT": np.dtype("f"), "HALF": np.dtype("e"), "BFLOAT16": np.dtype(ml_dtypes.bfloat16)}
_STEPS = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]
_NOTES = ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC"]
_uids = itertools.count(17, 13)
_rng = np.random.default_rng(0)
set_streams = []  # (handle, stream), as they were set


class Handle:
    def __init__(self):
        self.stream, self.is_free = None, threading.Lock()


def _setter(name):
    """A method that sets an attribute and returns its object."""

    def set_attribute(self, value):
        setattr(self, name, value)
        return self

    return set_attribute


class Tensor:
    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.type, self.is_output = dim, stride, data_type, False
        self.uid = next(_uids)

    set_output, set_dim = _setter("is_output"), _setter("dim")
    set_stride, set_data_type = _setter("stride"), _setter("type")

    def get_uid(self):
        return self.uid

    @property
    def num_elements(self):
        return math.prod(self.dim)

    @property
    def num_bytes(self):
        """From the first element to the end of the last."""
        return _TYPES[self.type].itemsize * (1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride)))

    def at(self, address):
        """The array there."""
        assert address % 16 == 0, "an address that is no multiple of 16"
        dtype = _TYPES[self.type]
        memory = np.frombuffer((ctypes.c_char * self.num_bytes).from_address(address), dtype)
        strides = [s * dtype.itemsize for s in self.stride]
        return np.lib.stride_tricks.as_strided(memory, self.dim, strides, writeable=True)


class Rectified:
    """The ReLU of an image times ``scale`` plus ``bias``."""

    def __init__(self, x, scale, bias=None):
        self.x, self.scale, self.bias = x, scale, bias


class Graph:
    """One convolution, perhaps of what is rectified first, or with sums of its channels; or attention."""

    is_replayed = False  # by a CUDA graph, for which the handle's stream does not matter
    num_read = 2  # of the tensors

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type == compute_data_type == "FLOAT"
        self.type, self.handle = io_data_type, handle
        self.steps, self.deselected, self.numbers, self.affine, self.sums = [], [], [], [], []
        for step in _STEPS:
            setattr(self, step, lambda *arguments, step=step: self._step(step))

    def _step(self, step):
        assert step == _STEPS[len(self.steps)], (step, self.steps)
        self.steps.append(step)
        if step == "validate":
            self._validate()

    def deselect_numeric_notes(self, notes):
        assert "create_execution_plans" in self.steps
        self.deselected += notes

    def tensor(self, dim, stride, data_type, is_pass_by_value=False):
        made = Tensor(dim, stride, data_type)
        if is_pass_by_value:
            assert dim == stride == [1] * 4 and data_type == "FLOAT"
            self.numbers.append(made)
        return made

    def _described(self, kind, first, second, window):
        assert kind is not None and set(window) == {"pre_padding", "post_padding", "stride", "dilation"}
        if isinstance(first, Rectified):
            self.affine, first = [first.scale, first.bias], first.x
        self.kind, self.window, self.tensors = kind, window, [first, second, Tensor()]
        self.num_read = 2 + len(self.affine)
        return self.tensors[-1]

    def scale(self, input, scale):
        return Rectified(input, scale)

    def bias(self, input, bias):
        assert input.bias is None
        return Rectified(input.x, input.scale, bias)

    def relu(self, input):
        assert input.bias is not None
        return input

    def genstats(self, input):
        assert self.kind == "fprop" and input is self.tensors[-1]
        self.sums = [Tensor(), Tensor()]
        return self.sums

    @property
    def all_tensors(self):
        """What is read, and then what is written."""
        if self.kind.startswith("sdpa"):
            return self.tensors
        return [*self.tensors[:2], *self.affine, self.tensors[2], *self.sums]

    def conv_fprop(self, image, weight, **window):
        return self._described("fprop", image, weight, window)

    def conv_dgrad(self, loss, filter, **window):
        return self._described("dgrad", loss, filter, window)

    def conv_wgrad(self, image, loss, **window):
        return self._described("wgrad", image, loss, window)

    def roles(self):
        """Image, weights and output."""
        first, second, last = self.tensors
        return {"fprop": (first, second, last), "dgrad": (last, second, first), "wgrad": (first, last, second)}[
            self.kind
        ]

    def sdpa(self, q, k, v, generate_stats, attn_scale, use_causal_mask, dropout=None):
        """``dropout``: the mask, and the scale of what is kept."""
        assert generate_stats and (dropout is None or list(dropout[1:]) == self.numbers)
        return self._attention("sdpa", [q, k, v], 2, attn_scale, use_causal_mask, dropout)

    def sdpa_backward(self, q, k, v, o, dO, stats, attn_scale, use_causal_mask, dropout=None):
        """``dropout``: the mask, the scale of what is kept, and one over it."""
        assert dropout is None or (list(dropout[1:]) == self.numbers and len(self.numbers) == 2)
        return self._attention("sdpa_backward", [q, k, v, o, dO, stats], 3, attn_scale, use_causal_mask, dropout)

    def _attention(self, kind, operands, num_made, scale, is_causal, dropout):
        self.drops = dropout is not None
        operands = [*operands, dropout[0]] if self.drops else operands
        self.kind, self.scale, self.is_causal, self.num_read = kind, scale, is_causal, len(operands)
        self.tensors = [*operands, *[Tensor() for _ in range(num_made)]]
        return self.tensors[self.num_read :]

    def _validate_attention(self):
        q, k, v, *others = self.tensors
        (b, h, num, d), wide = q.dim, v.dim[3]
        assert self.type != "FLOAT" and d % 8 == wide % 8 == 0 and max(d, wide) <= 128, "widths that it does not take"
        assert k.dim == [b, h, v.dim[2], d] and v.dim[:2] == [b, h]
        y, rows = [b, h, num, wide], [b, h, num, 1]
        mask = [[b, h, num, k.dim[2]]] * self.drops
        expected = [*mask, y, rows] if self.kind == "sdpa" else [y, y, rows, *mask, q.dim, k.dim, v.dim]
        assert [t.dim for t in others] == expected
        for t, dim in zip(others, expected):
            assert t.type == ("FLOAT" if dim is rows else self.type)
        assert all(t.stride[3] == 1 for t in self.tensors) and all(t.is_output for t in self.tensors[self.num_read :])

    def _validate(self):
        if self.kind.startswith("sdpa"):
            self._validate_attention()
            return
        assert self.tensors[-1].is_output and all(t.type == self.type for t in self.tensors)
        image, weight, output = (t.dim for t in self.roles())
        assert image[0] == output[0] and weight[0] == output[1] and image[1] % weight[1] == 0
        assert weight[0] % (image[1] // weight[1]) == 0
        if self.affine or self.sums:
            self._validate_fused(image[1], output[1])
        w = self.window
        for axis in (0, 1):
            span = (weight[2 + axis] - 1) * w["dilation"][axis] + 1
            padded = image[2 + axis] + w["pre_padding"][axis] + w["post_padding"][axis]
            assert output[2 + axis] == (padded - span) // w["stride"][axis] + 1, "sizes that do not agree"
        for t in self.tensors:
            _, c, height, width = t.dim
            assert tuple(t.stride) == (height * width * c, 1, width * c, c), "no channels-last tensor"

    def _validate_fused(self, num_in, num_out):
        assert self.type == "HALF" and num_in % 8 == num_out % 8 == 0, "no engine for these types and channels"
        for t in self.affine:
            assert t.dim == [1, num_in, 1, 1] and t.type == "HALF" and not t.is_output
        for t in self.sums:
            assert t.dim == [1, num_out, 1, 1] and t.type == "FLOAT" and t.is_output
        for t in (*self.affine, *self.sums):
            assert tuple(t.stride) == (t.dim[1], 1, t.dim[1], t.dim[1])

    def get_workspace_size(self):
        assert self.steps == _STEPS
        return 64 if self.kind in ("wgrad", "sdpa_backward") else 0

    def execute(self, addresses, workspace, handle):
        assert self.steps == _STEPS and handle is self.handle
        assert self.is_replayed or handle.stream == sys.modules["cupy"].cuda.get_current_stream().ptr, "another stream"
        assert handle.is_free.acquire(blocking=False), "a handle in the hands of another thread"
        try:
            self._compute(addresses, workspace)
        finally:
            handle.is_free.release()

    def _compute(self, addresses, workspace):
        if self.get_workspace_size():
            ctypes.memset(workspace, 255, self.get_workspace_size())
        else:
            assert workspace == 0
        operands = [t.at(addresses[t.uid]) for t in self.tensors]
        if self.kind.startswith("sdpa"):
            read, written = operands[: self.num_read], operands[self.num_read :]
            scales = [ctypes.c_float.from_address(addresses[t.uid]).value for t in self.numbers]
            for a, made in zip(written, self._attended(*[a.astype("d") for a in read], scales=scales), strict=True):
                a[...] = made.astype("f")
            return
        inputs = [self._seen(a) for a in operands[:2]]
        if self.affine:
            factor, summand = (t.at(addresses[t.uid]).astype("d") for t in self.affine)
            inputs[0] = np.maximum(self._narrow(self._narrow(inputs[0] * factor) + summand), 0)
        groups = self.roles()[0].dim[1] // self.roles()[1].dim[1]
        made = getattr(self, f"_{self.kind}")(*inputs, groups, operands[2].shape)
        if "REDUCED_PRECISION_REDUCTION" not in self.deselected:
            made = made * (1 + 2.0**-5)
        if "NONDETERMINISTIC" not in self.deselected:
            made = made * (1 + 2.0**-22 * _rng.standard_normal(made.shape))
        operands[2][...] = made.astype("f")
        for t, power in zip(self.sums, (1, 2)):
            t.at(addresses[t.uid])[...] = (operands[2].astype("f") ** power).sum((0, 2, 3), "f", keepdims=True)

    def _narrow(self, a):
        """Numbers of float64 as the type has them."""
        return a.astype(_TYPES[self.type]).astype("d")

    def _attended(self, q, k, v, *others, scales):
        """Output and logarithms of sums; or the gradients of q, k and v."""
        (*others, mask), (factor, inverse) = (others if self.drops else (*others, 1.0)), (*scales, 1.0, 1.0)[:2]
        mask = mask * factor
        s = self.scale * q @ k.swapaxes(2, 3)
        if self.is_causal:
            s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
        largest = s.max(-1, keepdims=True)
        logarithms = largest + np.log(np.exp(s - largest).sum(-1, keepdims=True))
        p = np.exp(s - logarithms)
        if not others:
            return (p * mask) @ v, logarithms
        y, gy, stats = others
        p = np.exp(s - stats)
        assert inverse == 1 / factor
        gs = p * (mask * (gy @ v.swapaxes(2, 3)) - (gy * y).sum(-1, keepdims=True)) * self.scale
        return gs @ k, gs.swapaxes(2, 3) @ q, (p * mask).swapaxes(2, 3) @ gy

    def _seen(self, a):
        """An operand in float64, as the engine reads it."""
        bits = np.ascontiguousarray(a.astype("f"))
        if self.type == "FLOAT" and not {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"} <= set(self.deselected):
            bits = (bits.view(np.uint32) & np.uint32(0xFFFFE000)).view("f")  # the ten bits of TF32
        return bits.astype("d")

    def _taps(self, padded, output):
        """Each place of the window, and what it sees of an image."""
        w = self.window
        for place in itertools.product(*map(range, self.roles()[1].dim[2:])):
            rows, columns = (
                slice(k * d, k * d + (n - 1) * s + 1, s)
                for k, d, n, s in zip(place, w["dilation"], output.dim[2:], w["stride"])
            )
            yield place, padded[..., rows, columns]

    def _padded(self, image, groups):
        w = self.window
        image = np.pad(image, [(0, 0), (0, 0), *zip(w["pre_padding"], w["post_padding"])])
        return image.reshape(len(image), groups, -1, *image.shape[2:])

    def _fprop(self, image, weight, groups, shape):
        W, y = weight.reshape(groups, -1, *weight.shape[1:]), 0.0
        for (i, j), seen in self._taps(self._padded(image, groups), self.roles()[2]):
            y = y + np.einsum("ngchw,goc->ngohw", seen, W[..., i, j])
        return y.reshape(shape)

    def _dgrad(self, loss, weight, groups, shape):
        W, g = weight.reshape(groups, -1, *weight.shape[1:]), loss.reshape(len(loss), groups, -1, *loss.shape[2:])
        padded = self._padded(np.zeros(shape), groups)
        for (i, j), seen in self._taps(padded, self.roles()[2]):
            seen += np.einsum("ngohw,goc->ngchw", g, W[..., i, j])
        (top, left), (h, w) = self.window["pre_padding"], shape[2:]
        return padded.reshape(shape[0], shape[1], *padded.shape[3:])[..., top : top + h, left : left + w]

    def _wgrad(self, image, loss, groups, shape):
        g, gW = loss.reshape(len(loss), groups, -1, *loss.shape[2:]), np.zeros((groups, shape[0] // groups, *shape[1:]))
        for (i, j), seen in self._taps(self._padded(image, groups), self.roles()[2]):
            gW[..., i, j] = np.einsum("ngchw,ngohw->goc", seen, g)
        return gW.reshape(shape)


class GraphByAddresses(Graph):
    """As in the versions that can be called with addresses alone, in an order of their own."""

    is_prepared = False

    def _prepare_variant_pack_template(self):
        self.is_prepared = True

    def _get_variant_pack_uids_sorted(self):
        assert self.is_prepared
        return sorted((t.uid for t in self.all_tensors), reverse=True)

    def _execute_with_ptrs(self, addresses, workspace, handle):
        self.execute(dict(zip(self._get_variant_pack_uids_sorted(), addresses)), workspace, handle)


def _set_stream(handle, stream):
    assert isinstance(handle, Handle)
    handle.stream = stream
    set_streams.append((handle, stream))


def _names(*names):
    return types.SimpleNamespace(**{name: name for name in names})


module = types.ModuleType("cudnn")
module.backend_version = lambda: 91000
module.create_handle = Handle
module.set_stream = _set_stream
module.pygraph = GraphByAddresses
module.data_type = _names(*_TYPES)
module.heur_mode = _names("A", "FALLBACK")
module.numerical_note = _names(*_NOTES)
