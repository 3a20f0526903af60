"""dbrdist.utils and dbrdist.backends.cuda, under Chainer's names."""

import os
import warnings

import numpy as np
import pytest

import dbrdist
from dbrdist import utils
from dbrdist.backends import cuda
from dbrdist.utils import argument


def windows(size, k, s, p, d):
    """Where each window starts, by trying."""
    return [at for at in range(-p, size + p, s) if at + d * (k - 1) < size + p]


def test_sizes_of_convolutions():
    for size in range(1, 9):
        for k, s, p, d in [(k, s, p, d) for k in (1, 2, 3) for s in (1, 2, 3) for p in (0, 1) for d in (1, 2)]:
            if size + 2 * p < d * (k - 1) + 1:
                continue
            starts = windows(size, k, s, p, d)
            assert utils.get_conv_outsize(size, k, s, p, d=d) == len(starts), (size, k, s, p, d)
            end = starts[-1] + d * (k - 1) + 1  # with cover_all a further window starts where some is left over
            assert utils.get_conv_outsize(size, k, s, p, True, d) == len(starts) + (end < size + p)
            back = utils.get_deconv_outsize(len(starts), k, s, p, d=d)
            assert utils.get_conv_outsize(back, k, s, p, d=d) == len(starts) and back <= size
            if s <= k:
                back = utils.get_deconv_outsize(len(starts), k, s, p, True, d)
                assert utils.get_conv_outsize(back, k, s, p, True, d) == len(starts)


def test_walker_alias_draws_by_probability():
    for probs in ([1, 2, 3, 0, 4], [1.0], [0, 0, 5], np.random.default_rng(0).random(50) ** 4):
        p = np.asarray(probs, float) / np.sum(probs)
        drawn = utils.WalkerAlias(probs).sample((400, 100))
        assert drawn.dtype == np.int32 and drawn.shape == (400, 100)
        counts = np.bincount(drawn.ravel(), minlength=len(p))
        assert (counts[p == 0] == 0).all()
        chi2 = (((counts - p * drawn.size) ** 2)[p > 0] / (p[p > 0] * drawn.size)).sum()
        assert chi2 < len(p) + 5 * np.sqrt(2 * len(p))


def test_walker_alias_follows_the_seed_and_takes_any_shape():
    dbrdist.random.set_seed(3)
    sampler = utils.WalkerAlias(np.ones(7))
    first, second = sampler.sample(20), sampler.sample(20)
    assert first.shape == (20,) and (first != second).any()
    dbrdist.random.set_seed(3)
    np.testing.assert_array_equal(utils.WalkerAlias(np.ones(7)).sample((20,)), first)
    assert sampler.sample(()).shape == () and sampler.sample((0, 3)).shape == (0, 3)
    assert sampler.to_cpu() is sampler and sampler.device.name == "@numpy"


@pytest.mark.parametrize("probs", [[], [[1.0]], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_walker_alias_refuses(probs):
    with pytest.raises(ValueError, match="WalkerAlias: probs: expected"):
        utils.WalkerAlias(probs)


def test_arguments():
    def function(**kwargs):
        return argument.parse_kwargs(kwargs, ("a", 1), ("b", 2), test="use config.train")

    assert function() == (1, 2) and function(b=5) == (1, 5)
    with pytest.raises(TypeError, match="function: unexpected argument 'c'; expected one of: a, b"):
        function(c=1)
    with pytest.raises(ValueError, match=r"use config.train"):
        function(test=True)
    argument.assert_kwargs_empty({})
    with pytest.raises(TypeError, match="unexpected arguments 'x', 'y'"):
        argument.assert_kwargs_empty({"y": 1, "x": 2})


def test_arrays():
    assert isinstance(utils.force_array(np.sum(np.ones(3))), np.ndarray)
    assert utils.force_array(2, np.float32).dtype == np.float32
    x = np.ones(2)
    assert utils.force_array(x) is x and utils.force_array(x, np.float32).dtype == np.float32
    assert utils.force_type(np.dtype("f"), 2.5) == np.float32(2.5) and utils.force_type(np.dtype("f"), x) is x
    assert utils.size_of_shape((2, 3)) == 6 and utils.size_of_shape(()) == 1
    np.testing.assert_array_equal(utils.sum_to(np.ones((4, 2, 3)), (2, 1)), np.full((2, 1), 12.0))


def test_folders():
    with utils.tempdir(prefix="mine") as path:
        open(os.path.join(path, "file"), "w").close()
        assert os.path.basename(path).startswith("mine")
    assert not os.path.exists(path)


def test_marks():
    with pytest.warns(FutureWarning, match="f is experimental"):
        utils.experimental("f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        utils.nondeterministic("f")
    with dbrdist.using_config("debug", True), pytest.warns(UserWarning, match="f may give slightly other numbers"):
        utils.nondeterministic("f")


def test_final():
    class Base(utils.enable_final()):
        @utils.final
        def f(self):
            pass

        @utils.final(action=DeprecationWarning)
        def g(self):
            pass

        def h(self):
            pass

    with pytest.raises(TypeError, match=r"Wrong.f overrides Base.f, which is final"):

        class Wrong(Base):
            def f(self):
                pass

    with pytest.warns(DeprecationWarning, match=r"Old.g overrides Base.g"):

        class Old(Base):
            def g(self):
                pass

            def h(self):
                pass


def test_cuda_without_a_gpu():
    if cuda.available:
        pytest.skip("there is a GPU")
    x = np.ones(3)
    assert not cuda.cudnn_enabled and not isinstance(x, cuda.ndarray)
    assert cuda.get_array_module(x) is np and cuda.get_device_from_id(-1) is cuda.get_device_from_array(x)
    with cuda.get_device_from_array(x) as device:
        device.use()
        assert int(device) == device.id == -1 and device == cuda.DummyDevice
    assert cuda.to_cpu([x, (x,)])[0] is x
    assert cuda.fuse()(abs) is abs is cuda.fuse(abs) and cuda.memoize()(abs)(-2) == 2
    assert not cuda.should_use_cudnn(">=auto") and not cuda.should_use_cudnn_tensor_core("f")
    cuda.clear_memo()
    for call in (lambda: cuda.to_gpu(x), lambda: cuda.elementwise("T x", "T y", "y = x", "copy"), cuda.Stream):
        with pytest.raises(RuntimeError, match="expected a GPU and CuPy"):
            call()
    with pytest.raises(ValueError, match="level: expected"):
        cuda.should_use_cudnn("auto")
    with pytest.raises(AttributeError, match="has no attribute 'to_gpuu'"):
        _ = cuda.to_gpuu


def test_devices_as_chainer_spells_them():
    for spec in (-1, "-1", "@numpy", "native", np, None, ("cupy", 1)[:0] or -1):
        assert dbrdist.get_device(spec).name == "@numpy", spec
    for spec in (1, "1", "@cupy:1", ("cupy", 1), np.int64(1)):
        assert dbrdist.get_device(spec).name == "@cupy:1", spec
    with pytest.raises(ValueError, match="got 'one'"):
        dbrdist.get_device("one")
