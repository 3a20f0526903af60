"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass
class Findings:
    """Collects findings in the order in which they are made."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, level: str, title: str, detail: str, what_to_do: str = "") -> None:
        self.entries.append({"level": level, "title": title, "detail": detail, "what_to_do": what_to_do})
        print(_line(self.entries[-1]), flush=True)

    def ok(self, title: str, detail: str) -> None:
        self.add(OK, title, detail)

    def warn(self, title: str, detail: str, what_to_do: str) -> None:
        self.add(WARN, title, detail, what_to_do)

    def fail(self, title: str, detail: str, what_to_do: str) -> None:
        self.add(FAIL, title, detail, what_to_do)

    @property
    def failed(self) -> bool:
        return any(entry["level"] == FAIL for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _line(entry: dict[str, str]) -> str:
    text = f"{entry['level']:<5} {entry['title']:<16} {entry['detail']}"
    return text + (f"\n      -> {entry['what_to_do']}" if entry["what_to_do"] else "")
