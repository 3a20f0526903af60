"""The one error that all ranks raise when they disagree or one of them has an error, from the words of each."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from dbrdist import errors
from dbrdist.core.tape import checks
from dbrdist.errors import CommunicatorError

_MAX_LISTED = 8
_HOMES = (builtins, errors)  # of exceptions that every rank can make from a text


@dataclass
class Words:
    """What one rank says about its call."""

    verb: str
    number: int
    root: int
    config: str
    what: str  # that all ranks must have alike in this verb: "the same shape and type"
    detail: str  # what this rank has: "shape (3,) of float32"; may have several lines
    where: str
    error_kind: str
    error_text: str

    def encode(self) -> bytes:
        """As bytes to send; nothing is pickled."""
        return json.dumps(astuple(self)).encode()

    @staticmethod
    def decode(raw: bytes) -> Words:
        """From bytes."""
        return Words(*json.loads(raw))


def kind_of(error: Exception | None) -> str:
    """The name of an error's class where every rank can make one from a text, else CommunicatorError's."""
    if error is None:
        return ""
    if isinstance(error, checks.ArgumentError):
        return "ValueError"
    name = type(error).__qualname__
    return name if any(getattr(home, name, None) is type(error) for home in _HOMES) else "CommunicatorError"


def judge(everyone: Sequence[Words]) -> Exception:
    """What every rank raises: an error of the lowest rank that has one, else what the ranks disagree on."""
    failed = [rank for rank, words in enumerate(everyone) if words.error_kind]
    verbs = _who_has_what([words.verb for words in everyone])
    if len(verbs) > 1:
        return CommunicatorError(
            "the ranks are in different verbs: "
            + _listed([f"{verb} on {name_ranks(ranks)}{_at(everyone, ranks)}" for verb, ranks in verbs])
            + ("; and " + everyone[failed[0]].error_text if failed else "")
        )
    if failed:
        first = everyone[failed[0]]
        text = first.error_text
        if len(failed) < len(everyone):
            text += f" (on {name_ranks(failed)} of {len(everyone)}, called at {first.where})"
        return _rebuild(first.error_kind, text)
    roots = _who_has_what([f"root {words.root}" for words in everyone])
    if len(roots) > 1:
        return CommunicatorError(_disagreement("the same root", roots, everyone))
    configs = _who_has_what([words.config for words in everyone])
    if len(configs) > 1:
        return CommunicatorError(_disagreement("the same configuration", _only_what_differs(configs), everyone))
    details = _who_has_what([words.detail for words in everyone])
    if len(details) > 1:
        return CommunicatorError(_disagreement(everyone[0].what, details, everyone))
    numbers = _who_has_what([f"number {words.number}" for words in everyone])
    listed = _listed([f"{number} on {name_ranks(ranks)}" for number, ranks in numbers])
    return CommunicatorError(f"the ranks have lost count of their verbs in {everyone[0].verb}: {listed}")


def _disagreement(what: str, groups: list[tuple[str, list[int]]], everyone: Sequence[Words]) -> str:
    places = f"(called{_places(everyone)})"
    if any("\n" in text for text, _ in groups):
        expected = groups[0][0].splitlines()
        listed = _listed([f"{name_ranks(r)}: {_first_difference(expected, t.splitlines())}" for t, r in groups[1:]])
        return f"expected {what} on every rank, but these differ from rank 0: {listed} {places}"
    listed = _listed([f"{text} on {name_ranks(ranks)}" for text, ranks in groups])
    verb = "" if everyone[0].verb == "agree" else f"{everyone[0].verb} "
    return f"{verb}expected {what} on every rank, got {listed} {places}"


def _only_what_differs(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    entries = [text.split(", ") for text, _ in groups]
    common = set(entries[0]).intersection(*entries[1:])
    return [(", ".join(e for e in own if e not in common), ranks) for own, (_, ranks) in zip(entries, groups)]


def _first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    for a, b in zip(expected, found):
        if a != b:
            return f"{b} instead of {a}"
    if len(expected) > len(found):
        return f"no {expected[len(found)]}"
    return f"{found[len(expected)]} besides"


def _places(everyone: Sequence[Words]) -> str:
    places = _who_has_what([words.where for words in everyone])
    if len(places) == 1:
        return f" at {places[0][0]}"
    return " at " + _listed([f"{where} on {name_ranks(ranks)}" for where, ranks in places])


def _at(everyone: Sequence[Words], ranks: Sequence[int]) -> str:
    return f" (at {everyone[ranks[0]].where})"


def _who_has_what(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _listed(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _MAX_LISTED} more" if len(parts) > _MAX_LISTED else ""
    return "; ".join(parts[:_MAX_LISTED]) + more


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 2, 3``; a long list is cut."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_MAX_LISTED]))}{more}"


def _rebuild(kind: str, text: str) -> Exception:
    made: type[Exception] = getattr(errors, kind, None) or getattr(builtins, kind)
    try:
        error: Exception = made(text)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        return CommunicatorError(f"{kind}: {text}")
    return error
