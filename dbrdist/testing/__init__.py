"""Tools for tests of functions, links and extensions, under Chainer's names. They run under unittest and pytest."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.core.tape.gradient_check import assert_allclose as assert_allclose
from dbrdist.testing import attr as attr
from dbrdist.testing import condition as condition
from dbrdist.testing.backend import BackendConfig as BackendConfig
from dbrdist.testing.backend import inject_backend_tests as inject_backend_tests
from dbrdist.testing.distribution_case import distribution_unittest as distribution_unittest
from dbrdist.testing.function_case import FunctionTestCase as FunctionTestCase
from dbrdist.testing.function_case import FunctionTestError as FunctionTestError
from dbrdist.testing.helper import assert_warns as assert_warns
from dbrdist.testing.helper import get_trainer_with_mock_updater as get_trainer_with_mock_updater
from dbrdist.testing.helper import patch as patch
from dbrdist.testing.helper import run_module as run_module
from dbrdist.testing.helper import save_and_load as save_and_load
from dbrdist.testing.helper import save_and_load_hdf5 as save_and_load_hdf5
from dbrdist.testing.helper import save_and_load_npz as save_and_load_npz
from dbrdist.testing.helper import with_requires as with_requires
from dbrdist.testing.helper import without_requires as without_requires
from dbrdist.testing.link_case import InitializerArgument as InitializerArgument
from dbrdist.testing.link_case import LinkInitializersTestCase as LinkInitializersTestCase
from dbrdist.testing.link_case import LinkTestCase as LinkTestCase
from dbrdist.testing.link_case import LinkTestError as LinkTestError
from dbrdist.testing.parameterized import from_pytest_parameterize as from_pytest_parameterize
from dbrdist.testing.parameterized import parameterize as parameterize
from dbrdist.testing.parameterized import parameterize_pytest as parameterize_pytest
from dbrdist.testing.parameterized import product as product
from dbrdist.testing.parameterized import product_dict as product_dict
from dbrdist.testing.random import fix_random as fix_random
from dbrdist.testing.random import generate_matrix as generate_matrix
from dbrdist.testing.random import generate_seed as generate_seed
from dbrdist.testing.unary import unary_math_function_unittest as unary_math_function_unittest

__getattr__ = _explained(__name__)
