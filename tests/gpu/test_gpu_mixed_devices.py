"""Arrays of one call on two devices, or on a device and in host memory: a clear error, and nothing is computed."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable
from dbrdist.core.array.gpu.mixed_devices import MixedDevicesError


class Places:
    """The same arrays here, on the second device, and in host memory."""

    def __init__(self, device):
        second = self.second = dbrdist.get_device("@cupy:1")
        self.h, self.th = np.ones((2, 2), np.float32), np.array([0, 1], np.int32)
        self.a, self.b = device.send(self.h.copy()), second.send(self.h.copy())
        self.t, self.t1 = device.send(self.th.copy()), second.send(self.th.copy())
        self.image = device.send(np.ones((1, 2, 2, 2), np.float32))

    def there(self, link):
        """A link on the second device."""
        return link.to_device(self.second)


CALLS = {
    "sum": lambda p: F.add(p.a, p.b),
    "operator": lambda p: Variable(p.a) + p.b,
    "operator with the host": lambda p: Variable(p.a) + p.h,
    "host first": lambda p: p.h + Variable(p.a),
    "product": lambda p: F.matmul(p.a, p.b),
    "joined": lambda p: F.concat((p.a, p.b)),
    "linear": lambda p: F.linear(p.a, p.b),
    "link elsewhere": lambda p: p.there(L.Linear(2, 2))(p.a),
    "link with an input of the host": lambda p: p.there(L.Linear(2, 2))(p.h),
    "link of the host": lambda p: L.Linear(2, 2)(p.a),
    "normalization": lambda p: p.there(L.BatchNormalization(2))(p.a),
    "normalization of the host's": lambda p: p.there(L.BatchNormalization(2))(p.h),
    "convolution": lambda p: p.there(L.Convolution2D(2, 2, 1))(p.image),
    "recurrent": lambda p: p.there(L.NStepLSTM(1, 2, 2, 0.0))(None, None, [p.a]),
    "choice": lambda p: F.where(p.a > 0, p.a, p.b),
    "condition of the host": lambda p: F.where(p.h > 0, p.a, p.a),
    "labels elsewhere": lambda p: F.softmax_cross_entropy(p.a, p.t1),
    "labels of the host": lambda p: F.softmax_cross_entropy(p.a, p.th),
    "labels of two classes": lambda p: F.sigmoid_cross_entropy(p.a[0], p.t1),
    "accuracy": lambda p: F.accuracy(p.a, p.t1),
    "accuracy with the host's labels": lambda p: F.accuracy(p.a, p.th),
    "distance": lambda p: F.mean_squared_error(p.a, p.h),
    "embedding": lambda p: p.there(L.EmbedID(3, 2))(p.t),
    "elements": lambda p: F.get_item(Variable(p.a), p.t1),
    "mask": lambda p: F.dropout(p.a, mask=p.b),
    "mask of attention": lambda p: F.scaled_dot_product_attention(p.a, p.a, p.a, p.second.send(p.h > 0)),
    "numbers as a mask of attention": lambda p: F.multi_head_attention(*[Variable(p.a[None])] * 3, 1, p.b),
    "the host's mask of attention": lambda p: F.multi_head_attention(*[Variable(p.a[None])] * 3, 1, p.h < 0),
    "sums of products": lambda p: F.einsum("ij,jk", p.a, p.b),
    "largest": lambda p: F.maximum(p.a, p.b),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_mix_is_an_error_that_names_the_places(name, device, on):
    if on not in ("stand-in", "whole") and (on == "numpy" or device.xp.cuda.runtime.getDeviceCount() < 2):
        pytest.skip("needs a second device")
    with pytest.raises(MixedDevicesError, match=r"all (inputs|arguments) on one device, got .*(@cupy:1|the host)"):
        CALLS[name](Places(device))
    assert dbrdist.core.array.backend.current_device() == device


def test_one_device_is_no_mix(device, on):
    if on == "numpy":
        pytest.skip("needs a device")
    x, t = device.send(np.ones((2, 2), np.float32)), device.send(np.array([0, 1], np.int32))
    F.softmax_cross_entropy(x, t), F.accuracy(x, t), F.where(x > 0, x, x), F.get_item(Variable(x), t)
    assert F.embed_id(t, x).shape == (2, 2)
    np.testing.assert_array_equal(dbrdist.core.array.backend.to_cpu((Variable(x) + 1.0).array), 2.0)
