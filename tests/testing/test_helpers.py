"""The decorators and helpers of dbrdist.testing."""

import os
import sys
import types
import unittest
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import testing
from dbrdist.testing import attr, condition


def run(*cases):
    """The result of test classes, under unittest."""
    result = unittest.TestResult()
    for case in cases:
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def texts(result):
    return [text for _, text in result.failures + result.errors]


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_product_and_product_dict():
    assert testing.product({"y": "ab", "x": [1, 2]}) == [
        {"x": 1, "y": "a"},
        {"x": 1, "y": "b"},
        {"x": 2, "y": "a"},
        {"x": 2, "y": "b"},
    ]
    lists = [[{"a": 1}, {"a": 2}], [{"b": 3, "c": 4}]]
    merged = [{"a": 1, "b": 3, "c": 4}, {"a": 2, "b": 3, "c": 4}]
    assert testing.product_dict(*lists) == testing.product(lists) == merged
    for wrong in ([1], "ab", 3):
        with pytest.raises(TypeError, match="expected"):
            testing.product(wrong)
    with pytest.raises(TypeError, match="lists of dictionaries"):
        testing.product_dict([1])


def test_from_pytest_parameterize():
    assert testing.from_pytest_parameterize("x, y", [(1, 2), (3, 4)]) == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    assert testing.from_pytest_parameterize(["x"], [1, (2,)]) == [{"x": 1}, {"x": 2}]
    with pytest.raises(ValueError, match="expected 2 for x, y, got"):
        testing.from_pytest_parameterize("x,y", [(1, 2, 3)])


@pytest.fixture
def module(monkeypatch):
    """A module that test classes can be made in."""
    made = types.ModuleType("a_test_module")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def case_in(module, **members):
    return type("TestIt", (unittest.TestCase,), {"__module__": module.__name__, **members})


def classes(module):
    return [value for value in vars(module).values() if isinstance(value, type)]


def test_parameterize_makes_a_class_for_each(module):
    seen = []

    def test_it(self):
        seen.append((self.x, self.f(3)))
        self.assertNotEqual(self.x, 2)

    double = {"x": 2, "f": lambda v: 2 * v}
    bundle = testing.parameterize({"x": 1, "f": abs}, double)(case_in(module, test_it=test_it))
    assert not isinstance(bundle, type) and len(classes(module)) == 2
    result = run(*classes(module))
    assert seen == [(1, 3), (2, 6)]
    (text,) = texts(result)
    assert "test parameters of TestIt.test_it:" in text and "x: 2" in text
    assert classes(module)[0].__name__.startswith("TestIt_param_0_{f=abs, x=1")


def test_parameterize_twice_and_with_backends(module):
    seen = []
    case = case_in(module, test_it=lambda self, config: seen.append((self.x, self.y, config.autotune)))
    bundle = testing.inject_backend_tests(["test_it"], [{}, {"autotune": True}])(case)
    bundle = testing.parameterize_pytest("x", [1, 2])(bundle)
    bundle = testing.parameterize({"y": 3}, {"y": 4})(bundle)
    assert len(classes(module)) == len(bundle.cases) == 4
    assert run(*classes(module)).testsRun == 8 and len(set(seen)) == 8


def test_what_parameterize_refuses(module):
    with pytest.raises(TypeError, match=r"forget the \* before product"):
        testing.parameterize(testing.product({"x": [1]}))
    with pytest.raises(TypeError, match="inherits from unittest"):
        testing.parameterize({})(lambda: None)


# ---- conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decorator", "passes", "num_runs"),
    [
        (condition.retry(3), "no, no, yes", 3),
        (condition.retry(3), "yes", 1),
        (condition.retry(2), "no, no", None),
        (condition.repeat(3), "yes, yes, yes", 3),
        (condition.repeat(3), "yes, no", None),
        (condition.repeat_with_success_at_least(4, 2), "no, yes, no, yes", 4),
        (condition.repeat_with_success_at_least(4, 2), "no, yes, no, no", None),
    ],
)
def test_conditions(decorator, passes, num_runs):
    plan, set_ups = iter(passes.split(", ")), []

    class Case(unittest.TestCase):
        def setUp(self):
            set_ups.append(self)

        @decorator
        def test_it(self):
            if next(plan) == "no":
                raise KeyError("the reason")

    result = run(Case)
    assert result.wasSuccessful() == (num_runs is not None)
    assert list(plan) == []
    if num_runs is None:
        assert "runs to pass, but" in texts(result)[0] and "KeyError: 'the reason'" in texts(result)[0]
    else:
        assert len({id(s) for s in set_ups}) == num_runs + 1  # and that of the runner


def test_a_condition_passes_a_skip_on():
    class Case(unittest.TestCase):
        @condition.retry(3)
        def test_it(self):
            self.skipTest("not here")

    assert run(Case).skipped[0][1] == "not here"
    with pytest.raises(ValueError, match="expected 1 to times=2, got 3"):
        condition.repeat_with_success_at_least(2, 3)


# ---- backends -------------------------------------------------------------------------------------------------------


def test_backend_config():
    config = testing.BackendConfig({"use_cudnn": "always", "autotune": True})
    assert config.xp is np and str(config.device) == "@numpy"
    with config:
        assert dbrdist.config.use_cudnn == "always" and dbrdist.config.autotune
        with config:
            pass
    assert dbrdist.config.use_cudnn == "auto" and not dbrdist.config.autotune
    x = np.ones(2)
    assert isinstance(config.get_array([x, None]), list) and config.get_array((x, None))[1] is None
    assert "use_cudnn='always'" in repr(config)
    with pytest.raises(ValueError, match=r"expected some of use_cuda.*got 'use_gpu'"):
        testing.BackendConfig({"use_gpu": True})
    with pytest.raises(TypeError, match="expected a dictionary"):
        testing.BackendConfig([])
    assert str(testing.BackendConfig({"use_cuda": True, "cuda_device": 1}).device) == "@cupy:1"


def test_inject_backend_tests_skips_what_is_missing():
    configs = [{}, {"use_cuda": True, "cuda_device": 9}, {"use_ideep": "always"}, {"use_chainerx": True}]
    seen = []

    @testing.inject_backend_tests(None, configs)
    class Case(unittest.TestCase):
        def test_it(self, backend_config):
            seen.append(backend_config)

        def test_other(self):
            seen.append("other")

    result = run(Case)
    assert result.testsRun == 5 and len(seen) == 2 and "other" in seen
    reasons = " ".join(reason for _, reason in result.skipped)
    assert "needs 10 GPUs" in reasons or "needs a GPU" in reasons
    assert "ChainerX" in reasons and "iDeep" in reasons


def test_what_inject_backend_tests_refuses():
    class Case(unittest.TestCase):
        def test_it(self, backend_config):
            pass

    with pytest.raises(RuntimeError, match="two of the configurations are equal"):
        testing.inject_backend_tests(None, [{}, {}])(Case)
    for arguments in (("test_it", [{}]), (None, {}), (None, [1])):
        with pytest.raises(TypeError, match="expected a list"):
            testing.inject_backend_tests(*arguments)


def test_attr_marks_for_pytest():
    @attr.slow
    def test_it():
        pass

    @attr.multi_gpu(3)
    def test_gpus():
        pass

    assert [mark.name for mark in test_it.pytestmark] == ["slow"]
    assert {mark.name for mark in test_gpus.pytestmark} == {"gpu", "multi_gpu"}
    assert {mark.name for mark in attr.cudnn(run).pytestmark} == {"gpu", "cudnn"}


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_fix_random_of_a_class_and_of_a_method():
    seen = []

    def draw():
        seen.append((np.random.rand(), testing.generate_seed(), dbrdist.random.raw_words(1, 1)[0, 0]))

    @testing.fix_random()
    class Case(unittest.TestCase):
        def test_a(self):
            draw()

        def test_b(self):
            draw()

    class Other(unittest.TestCase):
        @testing.fix_random()
        def test_it(self):
            draw()

    before = np.random.get_state()[1].copy(), dbrdist.random.get_state()
    assert run(Case, Other).wasSuccessful()
    assert len(seen) == 3 and len(set(seen)) == 1 and 0 <= seen[0][1] < 2**32
    assert np.array_equal(np.random.get_state()[1], before[0]) and dbrdist.random.get_state() == before[1]
    with pytest.raises(RuntimeError, match="under @fix_random"):
        testing.generate_seed()


def test_retries_under_fix_random_draw_other_numbers():
    seen = []

    @testing.fix_random()
    class Case(unittest.TestCase):
        @condition.repeat(3)
        def test_it(self):
            seen.append(np.random.rand())

    assert run(Case).wasSuccessful() and len(set(seen)) == 3


def test_fix_random_after_a_set_up_that_fails():
    @testing.fix_random()
    class Case(unittest.TestCase):
        def setUp(self):
            raise KeyError("no")

        def test_it(self):
            pass

    assert not run(Case).wasSuccessful()
    with pytest.raises(RuntimeError, match="under @fix_random"):
        testing.generate_seed()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (3, 5)])
def test_generate_matrix(shape, dtype):
    a = testing.generate_matrix(shape, dtype, singular_values=[1, 2, 0.5])
    assert a.shape == shape and a.dtype == dtype
    s = np.linalg.svd(a, compute_uv=False)
    np.testing.assert_allclose(s, np.broadcast_to([2, 1, 0.5], s.shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (((2, 2),), {}, TypeError, "expected singular_values and no other keyword, got none"),
        (((2, 2),), {"singular_values": 1, "rank": 2}, TypeError, "rank"),
        (((2,),), {"singular_values": 1}, ValueError, "two axes or more"),
        (((2, 2), int), {"singular_values": 1}, TypeError, "floating or complex"),
        (((2, 2),), {"singular_values": 1j}, TypeError, "real numbers"),
        (((2, 2),), {"singular_values": [1, -1]}, ValueError, "none below 0, got -1"),
    ],
)
def test_what_generate_matrix_refuses(arguments, keywords, error, words):
    with pytest.raises(error, match=words):
        testing.generate_matrix(*arguments, **keywords)


# ---- helpers --------------------------------------------------------------------------------------------------------


def test_assert_warns():
    with testing.assert_warns(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    with (
        pytest.raises(AssertionError, match="of type FutureWarning, got UserWarning"),
        testing.assert_warns(FutureWarning),
    ):
        warnings.warn("other", UserWarning, stacklevel=1)


def test_patch_counts_calls_and_still_calls():
    with testing.patch("os.path.basename") as counted:
        assert os.path.basename("a/b") == "b"
    counted.assert_called_once_with("a/b")
    with testing.patch("os.path.basename", return_value=3):
        assert os.path.basename("a/b") == 3
    with testing.patch("os.path.basename", new=len):
        assert os.path.basename("a/b") == 3
    assert os.path.basename("a/b") == "b"


@pytest.mark.parametrize(
    ("requirements", "met"),
    [
        (["numpy"], True),
        (["numpy>=1.10"], True),
        (["numpy >= 1.10, <1.11"], False),
        (["numpy>=1.10", "no-such-package"], False),
        (["numpy<1000", "pytest!=1.0"], True),
        (["numpy==0.1"], False),
        (["numpy>0.1,<=999.0.0rc1"], True),
    ],
)
def test_requirements(requirements, met):
    class Case(unittest.TestCase):
        @testing.with_requires(*requirements)
        def test_with(self):
            pass

        @testing.without_requires(*requirements)
        def test_without(self):
            pass

    ((skipped, reason),) = run(Case).skipped
    assert skipped._testMethodName == ("test_without" if met else "test_with")
    assert requirements[-1] in reason


@pytest.mark.parametrize("requirement", ["numpy=>1", "numpy>=", "a b", "numpy>=x"])
def test_a_requirement_that_cannot_be_read(requirement):
    with pytest.raises(ValueError, match=r"expected a (requirement|version) such as"):
        testing.with_requires(requirement)


def test_save_and_load():
    a, b = L.Linear(3, 2), L.Linear(3, 2)
    b.W.array[...] = 0
    testing.save_and_load_npz(a, b)
    assert (a.W.array == b.W.array).all()
    paths = []
    testing.save_and_load(a, b, "name", lambda path, x: paths.append(path), lambda path, x: paths.append(path))
    assert paths[0] == paths[1] and os.path.basename(paths[0]) == "name"
    assert not os.path.exists(os.path.dirname(paths[0]))


def test_a_trainer_that_only_counts(tmp_path):
    seen = []

    def look(trainer):
        u = trainer.updater
        seen.append((u.iteration, u.epoch, u.epoch_detail, u.previous_epoch_detail, u.is_new_epoch))

    look.trigger = (1, "iteration")
    trainer = testing.get_trainer_with_mock_updater((2, "epoch"), iter_per_epoch=2, extensions=[look])
    trainer.out = str(tmp_path)
    trainer.run()
    assert seen == [(1, 0, 0.5, 0.0, False), (2, 1, 1.0, 0.5, True), (3, 1, 1.5, 1.0, False), (4, 2, 2.0, 1.5, True)]
    assert trainer.updater.update_core.call_count == 4


def test_run_module_does_nothing_in_an_imported_module():
    assert testing.run_module("tests.some_module", __file__) is None


def test_assert_allclose_is_that_of_the_gradient_check():
    testing.assert_allclose(dbrdist.Variable(np.ones(2)), np.ones(2))
    with pytest.raises(AssertionError):
        testing.assert_allclose(1.0, 1.1)


# ---- unary functions ------------------------------------------------------------------------------------------------


def test_a_right_unary_function_passes(module):
    testing.unary_math_function_unittest(F.sin, label_expected="sin")(case_in(module))
    result = run(*classes(module))
    assert result.testsRun == 6 * 7 and not texts(result)


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        ({"func_expected": lambda x, dtype: np.cos(x)}, {"test_forward_cpu"}),
        ({"func": lambda x: F.sin(dbrdist.Variable(x.array)) + 0 * x, "func_expected": np.sin}, {"test_backward_cpu"}),
        ({"label_expected": "cos"}, {"test_label"}),
        ({"forward_options": {"atol": 9}, "func_expected": lambda x, dtype: np.cos(x)}, set()),
    ],
)
def test_a_wrong_unary_function_is_noticed(module, arguments, failing):
    testing.unary_math_function_unittest(**{"func": F.sin, **arguments})(case_in(module))
    result = run(*classes(module))
    assert {test._testMethodName for test, _ in result.failures} == failing


def test_linear_functions_and_own_data(module):
    def make_data(shape, dtype):
        return tuple(np.random.uniform(0.5, 1, shape).astype(dtype) for _ in range(3))

    testing.unary_math_function_unittest(F.sqrt, make_data=make_data, is_linear=True)(case_in(module))
    assert not texts(run(*classes(module)))
    with pytest.raises(ValueError, match="NumPy has none that is called 'relu'"):
        testing.unary_math_function_unittest(F.relu)
