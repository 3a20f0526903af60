"""Facts that are kept from job to job."""

import os

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


@pytest.mark.parametrize("is_fallback", [False, True])
def test_the_folder_of_the_cache_is_made_as_others_are_or_for_its_user_alone(tmp_path, monkeypatch, is_fallback):
    folder, before = tmp_path / "cache" / "dbrdist", os.umask(0)
    try:
        monkeypatch.setattr(cache, "directory", lambda: str(folder))
        monkeypatch.setattr(cache, "_FALLBACK", str(folder) if is_fallback else "elsewhere")
        cache.put("a", {"x": 2})
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == (0o700 if is_fallback else 0o755)
    assert cache.get("a") == {"x": 2}


@pytest.mark.parametrize("change", ["mode", "owner", None])
def test_facts_that_others_could_have_written_are_not_believed(tmp_path, monkeypatch, change):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.put("a", {"x": 1})
    if change == "mode":
        (tmp_path / "dbrdist").chmod(0o777)
    elif change == "owner":
        monkeypatch.setattr(cache.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert cache.get("a") == ({"x": 1} if change is None else None)
    cache.put("b", {"x": 2})
    assert ("b" in (tmp_path / "dbrdist" / "launch.json").read_text()) is (change is None)
