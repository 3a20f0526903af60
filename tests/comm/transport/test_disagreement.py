"""Tests of dbrdist.comm.transport.disagreement."""

from __future__ import annotations

import builtins

from dbrdist.comm.data import audit
from dbrdist.comm.transport import disagreement
from dbrdist.core.tape import checks
from dbrdist.errors import CommunicatorError, ConfigError
from tests.each import each


def test_long_lists_of_ranks_are_cut():
    assert disagreement.name_ranks([3]) == "rank 3"
    assert disagreement.name_ranks(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def words(verb="bcast", number=1, root=0, config="a 1, b 2", detail="d", where="x.py:1", kind="", text=""):
    return disagreement.Words(verb, number, root, config, "the same shape", detail, where, kind, text)


def made(*everyone):
    return disagreement.judge(everyone)


def test_words_travel_as_they_are():
    assert disagreement.Words.decode(words(detail="ä\n").encode()) == words(detail="ä\n")


def test_what_ranks_disagree_on():
    w = words
    place = "(called at x.py:1)"
    both = "(called at x.py:1 on rank 0; y.py:2 on rank 1)"
    for everyone, text in (
        ((w(), w("send", where="y.py:2")),
         "the ranks are in different verbs: bcast on rank 0 (at x.py:1); send on rank 1 (at y.py:2)"),
        ((w("send"), w(kind="ValueError", text="e")),
         "the ranks are in different verbs: send on rank 0 (at x.py:1); bcast on rank 1 (at x.py:1); and e"),
        ((w(), w(root=1), w()),
         f"bcast expected the same root on every rank, got root 0 on ranks 0, 2; root 1 on rank 1 {place}"),
        ((w(), w(config="a 1, b 3")),
         f"bcast expected the same configuration on every rank, got b 2 on rank 0; b 3 on rank 1 {place}"),
        ((w(), w(detail="e", where="y.py:2")),
         f"bcast expected the same shape on every rank, got d on rank 0; e on rank 1 {both}"),
        ((w("agree"), w("agree", detail="e")),
         f"expected the same shape on every rank, got d on rank 0; e on rank 1 {place}"),
        ((w(), w(number=2)),
         "the ranks have lost count of their verbs in bcast: number 1 on rank 0; number 2 on rank 1"),
        ((w(detail="a\nb\n"), w(detail="a\nc\n"), w(detail="a\n"), w(detail="a\nb\nd")),
         "expected the same shape on every rank, but these differ from rank 0: rank 1: c instead of b; rank 2: no b; "
         f"rank 3: d besides {place}"),
    ):  # fmt: skip
        error = made(*everyone)
        assert type(error) is CommunicatorError and str(error) == text


def test_errors_of_ranks_keep_their_class_where_all_can_make_it():
    for error, kind in (
        (None, ""), (ValueError("x"), "ValueError"), (ConfigError("x"), "ConfigError"),
        (checks.expected("f", "x", "a", "b"), "ValueError"), (type("Own", (ValueError,), {})("x"), "CommunicatorError"),
        (type("ValueError", (Exception,), {})("x"), "CommunicatorError"),
    ):  # fmt: skip
        assert disagreement.kind_of(error) == kind
    everyone = [words(), words(kind="ValueError", text="e", where="y.py:2"), words(kind="KeyError", text="f")]
    error = made(*everyone)
    assert type(error) is ValueError and str(error) == "e (on ranks 1, 2 of 3, called at y.py:2)"
    assert str(made(everyone[1], everyone[1])) == "e"
    odd = made(words(kind="UnicodeDecodeError", text="e"), words(kind="UnicodeDecodeError", text="e"))
    assert type(odd) is CommunicatorError and str(odd) == "UnicodeDecodeError: e"
    assert hasattr(builtins, "KeyError") and type(made(everyone[2])) is KeyError


@each(n=[1, 2, 8, 9, 20])
def test_long_lists_are_cut(n):
    text = disagreement.name_ranks(range(n))
    shown = ", ".join(map(str, range(min(n, 8))))
    assert text == ("rank 0" if n == 1 else f"ranks {shown}" + (f" and {n - 8} more" if n > 8 else ""))
    listed = disagreement._listed([str(i) for i in range(n)])
    assert listed == shown.replace(", ", "; ") + (f"; and {n - 8} more" if n > 8 else "")
    assert audit._listed(list(range(n))) == ", ".join(map(str, range(min(n, 5)))) + (
        f" and {n - 5} more" if n > 5 else ""
    )
