"""Datasets come from a server that is a function, into a folder of each test's own: no network."""

import io
from email.message import Message
from urllib import request

import pytest

from dbrdist.core.files import dataset_root
from tests.datasets.public.imagenet_helpers import LABELS, VAL, WHOLE, tar_of


class Server:
    """What answers instead of the network: files by address, and the addresses that were asked for."""

    def __init__(self):
        self.files = {}
        self.asked = []
        self.length = None

    def __call__(self, url, timeout):
        assert timeout > 0
        self.asked.append(url)
        if url not in self.files:
            raise request.URLError("no network in a test")
        answer = io.BytesIO(self.files[url])
        answer.headers = Message()
        answer.headers["Content-Length"] = self.length or str(len(self.files[url]))
        return answer


@pytest.fixture(autouse=True)
def server(monkeypatch, tmp_path):
    server = Server()
    monkeypatch.setattr(request, "urlopen", server)
    monkeypatch.setattr(dataset_root, "_root", str(tmp_path / "root"))
    return server


@pytest.fixture
def tars(tmp_path):
    """ImageNet's two tars in small, and a list of labels."""
    (tmp_path / "train.tar").write_bytes(WHOLE)
    (tmp_path / "val.tar").write_bytes(tar_of(VAL))
    (tmp_path / "labels.txt").write_text(LABELS)
    return tmp_path
