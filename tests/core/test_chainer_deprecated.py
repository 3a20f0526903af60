"""What Chainer 7 deprecates works and says so once it is called; mixed types; warnings that can be turned off."""

import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import initializers, utils


def linear():
    return L.Linear(3, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear().to_cpu(), r"to_cpu is deprecated. Please use to_device\('@numpy'\)"),
        (lambda: linear().zerograds(), "Link.zerograds is deprecated"),
        (lambda: dbrdist.Variable(np.ones(2, np.float32)).zerograd(), "Variable.zerograd is deprecated"),
    ],
)
def test_deprecated_methods_warn_where_they_are_called(call, words):
    with pytest.warns(DeprecationWarning, match=words) as seen:
        call()
    assert [w.filename for w in seen] == [__file__]


def test_warnings_of_experimental_functions_can_be_turned_off(monkeypatch):
    with pytest.warns(FutureWarning, match="f is experimental"):
        utils.experimental("f")
    assert dbrdist.disable_experimental_feature_warning is False
    monkeypatch.setattr(dbrdist, "disable_experimental_feature_warning", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        utils.experimental("f")


def test_mixed_types_are_types_to_numpy():
    for mixed, name, narrow in ((dbrdist.mixed16, "mixed16", np.float16), (dbrdist.mixedbf16, "mixedbf16", "bfloat16")):
        assert np.dtype(mixed) == dbrdist.get_dtype(narrow) == dbrdist.get_dtype(mixed) == dbrdist.get_dtype(name)
        assert mixed == name and hash(mixed) == hash(name) and repr(mixed) == f"dtype({name!r})"
        with dbrdist.using_config("dtype", mixed):
            assert linear().W.dtype == np.float32
            for link in (L.GroupNormalization(1, 4), L.LayerNormalization(4)):
                assert link.gamma.dtype == link.beta.dtype == np.float32
    assert np.zeros(2, np.float64).astype(dbrdist.mixed16).dtype == np.float16


@pytest.mark.parametrize("kind", ["Normal", "Uniform", "LeCunNormal", "GlorotUniform", "HeNormal", "Orthogonal"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_initializers_draw_from_numpys_old_generator(kind, dtype):
    def drawn():
        a = np.empty((5, 4), dtype)
        getattr(initializers, kind)(rng=np.random.RandomState(3))(a)
        return a

    assert np.isfinite(drawn()).all() and drawn().std() > 0 and (drawn() == drawn()).all()


def test_uniform_numbers_are_those_of_the_old_generator():
    a = np.empty((3, 2), np.float64)
    initializers.Uniform(0.5, rng=np.random.RandomState(1))(a)
    np.testing.assert_allclose(a, np.random.RandomState(1).uniform(-0.5, 0.5, (3, 2)), rtol=1e-14)
    initializers.Normal(0.5, rng=np.random.RandomState(1))(a)
    np.testing.assert_allclose(a, np.random.RandomState(1).normal(0, 0.5, (3, 2)), rtol=1e-14)


def test_debug_print_has_chainers_lines():
    v = dbrdist.Variable(np.array([1.0, 3.0], np.float32))
    lines = v.debug_print().splitlines()
    assert lines[0] == v.summary()
    assert lines[1:] == [
        "- device: CPU",
        "- backend: <class 'numpy.ndarray'>",
        "- shape: (2,)",
        "- dtype: float32",
        "- statistics: mean=2.00000000, std=1.00000000",
        "- grad: None",
    ]
    v.grad = np.zeros(2, np.float32)
    assert v.debug_print().endswith("- grad: 0")
    v.grad = np.array([0.0, 4.0], np.float32)
    assert v.debug_print().endswith("- grad: mean=2.00000000, std=2.00000000")
    assert dbrdist.Variable().debug_print().splitlines()[1:] == [
        f"- {name}: None" for name in ("device", "backend", "shape", "dtype", "statistics", "grad")
    ]
