"""The page of figures says what the records say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import figures  # noqa: E402
import harness  # noqa: E402

sys.path.pop(0)


def test_the_pages_say_what_the_records_say():
    outdated = figures.outdated(figures.files())
    assert not outdated, f"run `python benchmarks/figures.py --write`: {outdated}"


@pytest.fixture
def records(tmp_path, monkeypatch):
    shutil.copytree(figures.RECORDS, tmp_path / "records")
    monkeypatch.setattr(figures, "RECORDS", tmp_path / "records")
    return tmp_path / "records"


def test_a_record_that_changes_makes_them_outdated(records):
    path = max(records.glob("resnet50-2*.json"))
    record = json.loads(path.read_text())
    record["results"]["ratio"] = 0.5
    path.write_text(json.dumps(record))
    assert figures.outdated(figures.files()) == [figures.PAGE]
    assert "| 0.50: " in figures.page()


def test_of_each_processor_the_newest_record_counts(records):
    def put(date: str, cpu: str, ratio: float) -> None:
        side = {"median_seconds": 1.0, "peak_bytes": 1 << 20}
        content = {"machine": {"cpu": cpu}, "results": {"dbrdist": side, "torch": side, "ratio": ratio}}
        (records / f"lstm-{date}.json").write_text(json.dumps(content))

    for path in records.glob("lstm-*.json"):
        path.unlink()
    put("2030-01-01", "Some Xeon", 0.11)
    put("2030-01-03", "Another EPYC", 0.22)
    put("2030-01-02", "AMD EPYC", 0.33)
    put("2030-01-04", "A RISC-V", 0.44)
    (row,) = (row for row in figures.GROUPS["Training steps and inference on CPUs"] if row.kinds == "lstm")
    made = [[cell.strip() for cell in line.split("|")[1:-1]] for line in figures.lines(row, "here")]
    assert [cells[2].split(":")[0] for cells in made] == ["0.44", "0.22", "0.11"]
    assert [cells[3] for cells in made] == ["A RISC-V", "EPYC", "Xeon"]
    assert [bool(cells[0]) for cells in made] == [True, False, False]
    assert made[1][4] == "[2030-01-03](here/lstm-2030-01-03.json)"


def test_a_kind_whose_name_begins_like_another_is_another(records):
    assert {name for name, _ in figures.newest("resnet50").values()}.isdisjoint(
        {path.name for path in records.glob("resnet50-*b*.json")}
    )


def test_a_row_without_a_record_is_an_error(records):
    for path in records.glob("lstm-*.json"):
        path.unlink()
    with pytest.raises(ValueError, match="no record of 'lstm'"):
        figures.page()


@pytest.mark.slow
def test_a_record_replaces_that_of_its_own_machine_alone(records, monkeypatch):
    monkeypatch.setattr(harness, "RECORDS", records)
    for path in records.glob("lstm-*.json"):
        path.unlink()
    side = {"median_seconds": 1.0, "peak_bytes": 1 << 20}
    for cpu, ratio in (("Some Xeon", 0.9), ("AMD EPYC", 0.8), ("RISC-V", 0.7), ("AMD EPYC", 0.6)):
        monkeypatch.setattr(harness, "machine", lambda cpu=cpu: {"cpu": cpu})
        harness.record("lstm", {}, {"dbrdist": side, "torch": side, "ratio": ratio})
    found = {cpu: (name[-7:], record["results"]["ratio"]) for cpu, (name, record) in figures.newest("lstm").items()}
    day = harness.date.today().isoformat()[-2:]
    assert found == {"Xeon": (f"{day}.json", 0.9), "EPYC": ("-2.json", 0.6), "RISC-V": ("-3.json", 0.7)}


AWAITED = {
    "loader-torch": {"pillow": {"ours_relative": 2.5}, "simplejpeg": {"ours_relative": 1.25}},
    "many-files": {
        "scan": {"seconds": 9.0, "host_bytes_more": 70e6},
        "index": {"seconds": 3.0, "host_bytes_more": 90e6},
    },
    "snapshot-pause": {
        "at once": {"median_seconds": 0.6},
        "background": {"median_seconds": 0.05, "pauses": [0.04, 0.06]},
    },
    "gradient-error": {"ratio": 1.05},
    "rehearsal": {"a": {"measured": 9, "predicted": 10}, "b": {"measured": 11.5, "predicted": 10}},
}
SAID = {
    "loader-torch": "2.50; 1.25",
    "many-files": "9.0 s, with an index 3.0 s; 90 MB",
    "snapshot-pause": "0.050 s, 0.060 at most; written at once 0.60 s",
    "gradient-error": "1.05",
    "rehearsal": "0.90 to 1.15 (furthest: b)",
}


@pytest.mark.parametrize("kind", AWAITED)
def test_rows_that_wait_for_a_record_come_with_it(records, kind):
    for path in records.glob(f"{kind}-*.json"):
        path.unlink()
    [row] = [row for rows in figures.GROUPS.values() for row in rows if row.kinds == kind]
    assert figures.lines(row, "x") == []
    content = {"machine": {"cpu": "Some Xeon"}, "results": AWAITED[kind]}
    (records / f"{kind}-2030-01-01.json").write_text(json.dumps(content))
    [line] = figures.lines(row, "x")
    assert f"| {row.what} | {row.goal} | {SAID[kind]} | Xeon | [2030-01-01](x/{kind}-2030-01-01.json) |" in line
