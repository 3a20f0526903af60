"""Loading OpenCV."""

import importlib
import sys

import pytest

from dbrdist.datasets.image import opencv
from tests.each import each


@each(is_there=[True, False])
def test_threads_of_the_library_are_left_to_a_program_that_has_loaded_it(is_there, tmp_path_factory):
    folder_of_fake = tmp_path_factory.mktemp("fake")
    (folder_of_fake / "cv2.py").write_text("threads = []\nsetNumThreads = threads.append\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder_of_fake))
        patch.delitem(sys.modules, "cv2", raising=False)
        if is_there:
            importlib.import_module("cv2")
        found = opencv._loaded.__wrapped__()
        del sys.modules["cv2"]
        assert found.__file__.startswith(str(folder_of_fake)) and found.threads == [1] * (not is_there)


def test_it_is_none_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(opencv.importlib.util, "find_spec", lambda name: None)
    assert opencv.cv2_or_none.__wrapped__() is None


def test_a_module_that_another_thread_imports_is_there(monkeypatch):
    def find_spec(name):
        raise ValueError("cv2.__spec__ is not set")

    monkeypatch.setattr(opencv.importlib.util, "find_spec", find_spec)
    assert opencv.is_installed("cv2")
