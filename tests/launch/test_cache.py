"""Facts that are kept from job to job."""

import pytest
from dbrdist_launch import cache


def test_facts_are_kept_where_there_was_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache.get("a") is None
    cache.put("a", {"x": 1})
    cache.put("b", {"x": 2})
    assert (cache.get("a"), cache.get("b")) == ({"x": 1}, {"x": 2})
    assert cache.directory() == str(tmp_path / "new" / "dbrdist")


@pytest.mark.parametrize("content", ["", '{"a": "cut', "[" * 200000, "[1]", '{"a": 1}', "null", "\udcff"])
def test_a_damaged_file_of_facts_is_written_anew(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.put("a", {"x": 1})
    (tmp_path / "dbrdist" / "launch.json").write_text(content, errors="surrogateescape")
    assert cache.get("a") is None
    cache.put("a", {"x": 2})
    assert cache.get("a") == {"x": 2}
