"""Pickles that a real Chainer wrote load under compat and compute what they did: files_of_chainer/make.py made them."""

import itertools
import pickle
import pickletools
import warnings
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import compat
from dbrdist.errors import CheckpointError
from tests.each import each

FILES = Path(__file__).with_name("files_of_chainer")
RESULTS = np.load(FILES / "pickled-results.npz")
LINKS = sorted({name.partition("/")[0] for name in RESULTS.files if name.endswith("/0")})


def objects():
    with open(FILES / "pickled.pkl", "rb") as file:
        return pickle.load(file)


@pytest.mark.slow
@each(name=LINKS)
def test_a_link_computes_what_it_did(name, installed):
    link = objects()[name]
    assert type(link) is type(pickle.loads(pickle.dumps(link))) and type(link).__module__.startswith("dbrdist.")
    args = [RESULTS[f"{name}/{i}"] for i in range(sum(key.startswith(f"{name}/") for key in RESULTS.files) - 1)]
    with dbrdist.using_config("train", False):
        y = link(*args).array
        if hasattr(link, "reset_state"):
            link.reset_state()
        np.testing.assert_allclose(y, RESULTS[f"{name}/y"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(link))(*args).array, y)
    assert dict(link.copy("copy").namedparams()).keys() == dict(link.namedparams()).keys()


@each(name=["adam", "momentum", "smorms3", "own"])
def test_an_optimizer_goes_on_with_its_state_and_hooks(name, installed):
    optimizer = pickle.loads(objects()[name])
    assert optimizer.t == 1
    optimizer.update(optimizer.target, RESULTS["x"], RESULTS["t"])
    np.testing.assert_allclose(optimizer.target.predictor.W.array, RESULTS[f"{name}/y"], rtol=1e-5, atol=1e-6)


def test_an_optimizer_keeps_what_is_set_for_one_parameter_and_its_loss_scale(installed):
    optimizer = pickle.loads(objects()["own"])
    layer = optimizer.target.predictor
    assert (layer.W.update_rule.hyperparam.lr, layer.b.update_rule.hyperparam.lr) == (0.5, 0.1)
    assert list(layer.W.update_rule.hooks.pre) == ["Lasso"] and layer.b.update_rule.hooks is None
    assert optimizer.has_dynamic_loss_scale and optimizer.loss_scale == 2.0


@each(in_fp32=[True, False])
def test_an_optimizer_goes_on_updating_16_bit_parameters_in_float32(in_fp32, installed):
    """Also those of a model that it is set up with later."""
    optimizer = pickle.loads(with_fp32_update(objects()["momentum"]) if in_fp32 else objects()["momentum"])
    link = L.Scale(1, (3,))
    link.W = dbrdist.Parameter(np.ones(3, np.float16))
    optimizer.hyperparam.lr, optimizer.hyperparam.momentum = 1e-4, 0.0
    optimizer.setup(link)
    for _ in range(100):
        link.W.grad = np.ones(3, np.float16)
        optimizer.update()
    assert float(link.W.array[0]) == pytest.approx(0.99 if in_fp32 else 1.0, rel=2**-11)


def with_fp32_update(pickled):
    """A pickle as Chainer writes it after ``use_fp32_update()``: the flag is True wherever it stands."""
    is_next, name, flags = False, None, []
    for op, value, place in pickletools.genops(pickled):
        if op.name == "NEWFALSE" and is_next:
            flags.append(place)
        if op.name.endswith("PUT"):
            name = value if is_next else name
        else:
            is_next = value == ("_use_fp32_update" if op.name == "BINUNICODE" else name) and value is not None
    assert len(flags) == 3  # of the optimizer and of two rules
    changed = bytearray(pickled)
    for place in flags:
        changed[place] = pickle.NEWTRUE[0]
    return bytes(changed)


def test_parameters_variables_and_lists(installed):
    found = objects()
    assert found["parameter"].name == "p" and found["parameter"].array.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found["variable"].array, RESULTS["x"])
    link = found["link of a parameter"]
    assert type(link) is L.Parameter
    np.testing.assert_array_equal(link().array, RESULTS["x"])
    first, second = found["list"]
    assert (first.name, second.name) == ("0", "1") and not first.W.is_initialized
    assert found["list"][0](RESULTS["x"]).shape == (4, 2)


def test_links_that_had_seen_no_batch(installed):
    bn, local, deformable = objects()["without sizes"]
    images = np.ones((2, 2, 4, 4), "f")
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(bn(RESULTS["x"]).array, RESULTS["x"] / 2, rtol=1e-4)
    assert local(images).shape == deformable(images).shape == (2, 3, 2, 2)


@each(name=["Zero", "One", "NaN"])
def test_initializers_of_parameters_without_a_shape(name, installed):
    pickled = f"cchainer.initializers.constant\n{name}\n)\x81}}(X\x05\x00\x00\x00dtypeNub.".encode("latin-1")
    link = L.Linear(None, 2, initialW=pickle.loads(pickled))
    link(np.ones((2, 3), "f"))
    np.testing.assert_array_equal(link.W.array, np.full((2, 3), {"Zero": 0, "One": 1, "NaN": np.nan}[name]))


@each(is_chainers=[True, False])
def test_a_sequential_of_an_h5_file_of_chainer_has_chainers_order(is_chainers):
    h5py = pytest.importorskip("h5py")
    if is_chainers:
        compat.install()
    net = dbrdist.Sequential(L.Linear(3, 3), F.relu, L.Linear(3, 3), F.tanh, L.Linear(3, 3))
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            dbrdist.serializers.load_hdf5(str(FILES / "sequential.h5"), net)
    finally:
        compat.uninstall()
    words = [str(w.message) for w in given]
    if is_chainers:
        assert words == [], "a program of Chainer means Chainer's files"
    else:
        assert "read as Chainer's" in words[0] and "ChainList(*links)" in words[0], "for both orders fit"
    np.testing.assert_allclose(net(RESULTS["sequential/0"]).array, RESULTS["sequential/y"], rtol=1e-5)
    assert h5py.File(FILES / "sequential.h5").attrs.keys() == set()


@each(kind=["npz", "h5"])
def test_our_own_files_of_a_sequential_are_read_in_its_order(kind, tmp_path):
    if kind == "h5":
        pytest.importorskip("h5py")
    name = "npz" if kind == "npz" else "hdf5"
    save, load = getattr(dbrdist.serializers, f"save_{name}"), getattr(dbrdist.serializers, f"load_{name}")
    a, b = (dbrdist.Sequential(*(L.Linear(3, 3) for _ in range(3))) for _ in range(2))
    path = str(tmp_path / "a")
    save(path, a)
    load(path, b)
    for p, q in zip(a.params(), b.params()):
        np.testing.assert_array_equal(p.array, q.array)


@each(sizes=[(3, 3, 3, 3), (3, 3, 4, 3)])
def test_a_strangers_file_that_fits_in_two_orders_warns(sizes, tmp_path, recwarn):
    recwarn.clear()
    net = dbrdist.Sequential(*(L.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    np.savez(tmp_path / "a.npz", **{name[1:]: p.array for name, p in net.namedparams()})
    dbrdist.serializers.load_npz(str(tmp_path / "a.npz"), net)
    assert any("in another order" in str(w.message) for w in recwarn) == (len(set(sizes)) == 1)
    with pytest.raises(CheckpointError):
        dbrdist.serializers.load_npz(str(tmp_path / "a.npz"), dbrdist.Sequential(L.Linear(2, 2)))
