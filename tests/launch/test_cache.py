"""Facts that are kept from job to job."""

from dbrdist_launch import cache


def test_facts_are_kept_where_there_was_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache.get("a") is None
    cache.put("a", {"x": 1})
    cache.put("b", {"x": 2})
    assert (cache.get("a"), cache.get("b")) == ({"x": 1}, {"x": 2})
    assert cache.directory() == str(tmp_path / "new" / "dbrdist")
