import pytest

from dbrdist import compat


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()
