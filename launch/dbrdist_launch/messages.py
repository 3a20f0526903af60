"""Every kind of message between the launcher, its ranks' supervisors and commands such as `dbrdist-launch ps`.

On the wire a message is a line of JSON, `{"t": kind, ...}`; with `"n"` so many bytes follow it as they are, the field
`data`. Here alone messages become lines and lines become messages: what lacks a field of its kind, or has one of
another type, is no message. Fields of later versions are left out.
"""

from __future__ import annotations

from . import wire
from .named import NamedTuple

TYPE_CHECKING = False  # `typing` itself would cost each rank's supervisor 0.7 MB
if TYPE_CHECKING:
    from typing import Any


# ---- from a rank's supervisor ----


class Hello(NamedTuple):
    """The first message: which rank this is."""

    token: str
    rank: int = -1
    size: int = 0
    local_rank: int = 0
    host: str = ""
    local_size: int = 0  # 0: its starter does not say
    pid: int = 0  # of the supervisor
    port: int = 0  # of rank 0: one that is free on its host


class Started(NamedTuple):
    """The program runs."""

    pid: int


class Failed(NamedTuple):
    """The supervisor itself fails."""

    message: str


class Out(NamedTuple):
    """The program wrote something."""

    stream: str  # out or err
    data: bytes | memoryview = b""


class Taken(NamedTuple):
    """The program's stdin has taken so many bytes; nobody reads there any more."""

    bytes: int
    closed: bool


class Beat(NamedTuple):
    """The answer to a ping: what the program is doing."""

    state: str  # of its process
    traced: bool
    beats: int  # heartbeats so far
    step: int
    age: float | None  # seconds since the last heartbeat
    paused: bool
    fields: dict[str, Any]


class Pong(NamedTuple):
    """The answer to a ping of a rank whose program has ended."""


class RankEvent(NamedTuple):
    """Something happened to the program, or it told of itself."""

    event: str
    fields: dict[str, Any]


class FoundStacks(NamedTuple):
    """The stacks that were asked for, and the source lines of their frames."""

    text: str
    sources: dict[str, str]
    state: str


class Asked(NamedTuple):
    """A signal that asks for the end came to this rank by another way."""

    signal: int


class Ended(NamedTuple):
    """The program has ended badly, told at once: there may be no time for more."""

    code: int
    signal: int
    oom: str | None = None  # what says that the kernel had no memory left
    ours: bool = False  # the launcher ended it


class Exit(NamedTuple):
    """The program has ended, and all that it wrote has been passed on."""

    code: int
    signal: int
    oom: str | None = None
    ours: bool = False
    step: int | None = None
    age: float | None = None  # seconds since the last heartbeat


# ---- from the launcher ----


class Welcome(NamedTuple):
    """What to run, and how."""

    command: list[str]
    environment: dict[str, str]
    directory: str | None
    host_timeout: float
    window: int  # bytes of output that the launcher takes before it has written the last ones
    threads: str
    gpus: str
    inject: bool
    master: str  # the host of rank 0, and a port there
    port: int
    files: list[int]  # the soft limit of open files before and after the launcher raised it
    local_sizes: dict[str, int]  # ranks on its host, by the name of that
    input: bool  # its stdin comes over this connection


class Ping(NamedTuple):
    """Are you there?"""


class In(NamedTuple):
    """For the program's stdin; without bytes its end."""

    data: bytes = b""


class Credit(NamedTuple):
    """So many bytes of output were written."""

    bytes: int


class StopRequest(NamedTuple):
    """Ask the program to save and stop, by this signal."""

    signal: int


class Signal(NamedTuple):
    """Pass a signal on to those processes of the program that handle it."""

    signal: int


class Kill(NamedTuple):
    """End the program; None: with the usual time between SIGTERM and SIGKILL."""

    grace: float | None = None


class AskStacks(NamedTuple):
    """Send the stacks."""


class Bye(NamedTuple):
    """Nobody has a question any more."""


# ---- from commands, and to them ----


class Ask(NamedTuple):
    """A question about the job: state, stacks or stop."""

    token: str
    what: str


class Answer(NamedTuple):
    """The answer, as text."""

    data: bytes = b""


if TYPE_CHECKING:
    FromRank = Hello | Started | Failed | Out | Taken | Beat | Pong | RankEvent | FoundStacks | Asked | Ended | Exit
    ToRank = Welcome | Ping | In | Credit | StopRequest | Signal | Kill | AskStacks | Bye
    Message = FromRank | ToRank | Ask | Answer

KINDS: dict[str, type[Any]] = {
    "hello": Hello, "started": Started, "failed": Failed, "out": Out, "taken": Taken, "beat": Beat, "pong": Pong,
    "event": RankEvent, "stacks": FoundStacks, "asked": Asked, "ended": Ended, "exit": Exit, "welcome": Welcome,
    "ping": Ping, "in": In, "credit": Credit, "stop": StopRequest, "signal": Signal, "kill": Kill,
    "ask-stacks": AskStacks, "bye": Bye, "ask": Ask, "answer": Answer,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}
# By the annotation of a field: the types that JSON gives for it. A number without a fraction may come as an int.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "float": (float, int), "bytes": (bytes,),
    "memoryview": (memoryview,), "list": (list,), "dict": (dict,), "None": (type(None),),
}  # fmt: skip


class NonsenseError(ValueError):
    """The other end does not follow the protocol."""


def write(message: Message) -> tuple[bytes, bytes]:
    """The line of a message, and the bytes that follow it."""
    fields: dict[str, object] = {"t": _NAMES[type(message)], **message._asdict()}
    data: Any = fields.pop("data", b"")
    if data:
        fields["n"] = len(data)
    return wire.dumps(fields).encode() + b"\n", data


def read(fields: dict[str, Any], data: bytes = b"") -> Message:
    """The message of a line, without its length, and the bytes that followed it; NonsenseError for anything else."""
    kind = KINDS.get(str(fields.get("t")))
    if kind is None:
        raise NonsenseError(f"no message is called {fields.get('t')!r}")
    given = {**fields, "data": data}
    found = []
    for name, types in _types_of(kind):
        if name not in given and name not in kind._field_defaults:
            raise NonsenseError(f"{fields['t']} without {name}")
        value = given.get(name, kind._field_defaults.get(name))
        if type(value) not in types:
            raise NonsenseError(f"{fields['t']}: {name} is {value!r}")
        found.append(value)
    made: Message = kind(*found)
    return made


_known: dict[type, list[tuple[str, tuple[type, ...]]]] = {}


def _types_of(kind: type[Any]) -> list[tuple[str, tuple[type, ...]]]:
    if kind not in _known:
        rows = [(name, text.split(" | ")) for name, text in kind.__annotations__.items()]
        _known[kind] = [
            (name, tuple(found for word in words for found in _TYPES[word.partition("[")[0]])) for name, words in rows
        ]
    return _known[kind]
