"""Each kind of message, from its fields to a line and back."""

import json

import pytest
from dbrdist_launch import messages
from dbrdist_launch.messages import KINDS, NonsenseError, Out

# A value of each type that a field may have; the second one is wrong for it.
VALUES = {
    "int": (3, True), "str": ("é\n\udcff", 3), "bool": (True, 1), "float": (0.5, "0.5"), "bytes": (b"\0\xff\n", None),
    "list[str]": (["a", ""], "a"), "list[int]": ([1, 2], {}), "dict[str, Any]": ({"x": [1, None]}, []),
    "dict[str, str]": ({"a": "b"}, None), "dict[str, int]": ({"a": 1}, None), "None": (None, []),
}  # fmt: skip


def made(kind, at=0):
    """One of a kind with the value of each field's type; with `at`, that of the last one."""
    return kind(*[VALUES[text.split(" | ")[-at]][0] for text in kind.__annotations__.values()])


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("at", [0, 1])
def test_each_kind_comes_through(kind, at):
    if kind is Out:
        message = Out("err", b"\0\xff\n")
    else:
        message = made(kind, at)
    line, data = messages.write(message)
    fields = json.loads(line)
    assert fields.pop("n", 0) == len(data) and line.count(b"\n") == 1
    again = messages.read({**fields, "later": 1}, bytes(data))
    assert type(again) is kind and again == message


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name, kind in KINDS.items() for field in kind.__annotations__ if field != "data"],
)
def test_each_field_is_of_its_type(name, field):
    kind = KINDS[name]
    fields = json.loads(messages.write(made(kind) if kind is not Out else Out("out"))[0])
    fields.pop("n", None)
    wrong = VALUES[kind.__annotations__[field].partition(" | ")[0]][1]
    with pytest.raises(NonsenseError, match=field):
        messages.read({**fields, field: wrong})
    del fields[field]
    if field in kind._field_defaults:
        assert getattr(messages.read(fields), field) == kind._field_defaults[field]
    else:
        with pytest.raises(NonsenseError, match=f"{name} without {field}"):
            messages.read(fields)


def test_what_has_no_name_is_nonsense():
    for fields in ({}, {"t": None}, {"t": "nothing"}, {"t": ["ping"]}):
        with pytest.raises(NonsenseError, match="no message is called"):
            messages.read(fields)


def test_messages_are_tuples_with_names():
    one = messages.Ended(3, 0, ours=True)
    assert (one.code, one.signal, one.oom, one.ours) == tuple(one) == (3, 0, None, True)
    assert one._replace(code=4) == (4, 0, None, True) and one._asdict()["ours"] is True
    assert repr(one) == "Ended(code=3, signal=0, oom=None, ours=True)"
    for wrong in (lambda: messages.Ended(), lambda: messages.Ended(1, 2, 3, 4, 5), lambda: messages.Ended(1, 2, odd=3),
                  lambda: messages.Ended(1, 2, code=3)):  # fmt: skip
        with pytest.raises(TypeError, match="Ended"):
            wrong()
