"""Where the ranks' output goes: to the screen, the rank in front of each line, and as it is into a file per stream.

Both are written by threads of their own. Where a reader is slow, or a disk, they wait; the launcher does not, and a
rank is told to continue writing only when its last piece has arrived everywhere. So no byte is lost and none piles up.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import select
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .. import limits

_ENDS = re.compile(rb"((?>\r\n|\n|\r))(?!\Z)")


@dataclass(eq=False, repr=False)
class Piece:
    """What a rank wrote at one time."""

    rank: int
    host: str
    stream: str  # out or err
    data: bytes
    urgent: bool = False  # its rank might soon have to wait
    left: int = 0  # places where it has not arrived yet


class Screen:
    """Makes one text out of what many ranks write: each line begins with its rank, whatever the others write meanwhile.

    Nothing is left out. An unfinished line waits for its end for a moment; then it is shown, and continues where it
    stopped if no other rank wrote since, and on a new line if one did.
    """

    def __init__(self) -> None:
        self._rest: dict[tuple[int, str], tuple[bytes, bytes]] = {}  # (front, unfinished text that is not shown yet)
        self._since: dict[tuple[int, str], float] = {}  # from when on it has been so
        self._open: tuple[int, str] | None = None  # whose line the cursor is in
        self._at_start = True  # the cursor stands at the left, by a carriage return or a line's end

    def feed(self, key: tuple[int, str], front: bytes, data: bytes) -> bytes:
        """The text for what has come, up to the last end of a line."""
        if key in self._rest:
            data = self._rest.pop(key)[1] + data
            self._since.pop(key, None)
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # a last \r may be the first half of \r\n
        if len(data) - end > limits.LINE_BYTES:
            end = len(data)
        if end < len(data):
            self._rest[key] = (front, data[end:])
        return self._shown(key, front, data[:end]) if end else b""

    def flush(self, now: float = float("inf")) -> bytes:
        """The text for the lines that have been unfinished for a while; without a time for all."""
        due = [key for key in self._rest if now >= self._since.setdefault(key, min(now, 1e12)) + limits.PARTIAL_SECONDS]
        for key in due:
            self._since.pop(key, None)
        return b"".join(self._shown(key, *self._rest.pop(key)) for key in due)

    def restart_wait(self) -> None:
        """Start again to measure how long lines have been unfinished."""
        self._since.clear()

    def end(self) -> bytes:
        """What is left, and an end to its line."""
        text = self.flush()
        begin, self._open, self._at_start = b"\n" if self._open is not None else b"", None, True
        return text + begin

    def note(self, text: bytes) -> bytes:
        """A line of our own."""
        begin, self._open, self._at_start = b"\n" if self._open is not None else b"", None, True
        return begin + text + b"\n"

    def _shown(self, key: tuple[int, str], front: bytes, data: bytes) -> bytes:
        begin = b"\n" if self._open not in (None, key) else b""
        if self._open != key or self._at_start:
            begin += front
        self._at_start = data.endswith((b"\n", b"\r"))
        self._open = None if data.endswith(b"\n") else key
        if b"\r" in data:
            return begin + _ENDS.sub(lambda match: match[1] + front, data)
        return b"%b%b%b" % (begin, data[:-1].replace(b"\n", b"\n" + front), data[-1:])


class Writer:
    """Writes in a thread what it is handed, in order; `write` makes the bytes and puts them where they belong."""

    def __init__(
        self,
        write: Callable[[list[Piece | str]], None],
        idle: Callable[[bool, bool], None],  # called often, with: whether the write was slow, whether it was the last
        done: Callable[[list[Piece]], None],
    ) -> None:
        self._write, self._idle, self._done = write, idle, done
        self._queue: queue.SimpleQueue[Piece | str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, item: Piece | str) -> None:
        self._queue.put(item)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, however long that takes; an interrupt gives it up."""
        if self._thread is not None:
            self._queue.put(None)
            while self._thread.is_alive():
                self._thread.join(1.0)  # with a limit, so that signals are heard
            self._thread = None

    def _run(self) -> None:
        while True:
            try:
                items = [self._queue.get(timeout=limits.IDLE_SECONDS)]
                while not self._queue.empty() and len(items) < 1000:
                    items.append(self._queue.get())
            except queue.Empty:
                items = []
            last = None in items
            kept = [item for item in items if item is not None]
            before = time.monotonic()
            try:
                self._write(kept)
                self._idle(time.monotonic() - before > limits.IDLE_SECONDS, last)
            except Exception as error:  # an error of our own: the ranks must not wait forever
                os.write(2, f"dbrdist-launch: internal error, output is incomplete: {error!r}\n".encode())
            self._done([item for item in kept if isinstance(item, Piece)])
            if last:
                return


class Output:
    """Takes what ranks and launcher say. `written` is called from other threads, with pieces that have arrived."""

    def __init__(
        self,
        shown: Collection[int] | None = None,  # the ranks whose output is shown; None: all
        folder: str | None = None,
        view: bool = False,
        timestamps: bool = False,
        tee: str | None = None,
    ) -> None:
        self.shown, self.timestamps = shown, timestamps
        self.written: Callable[[Piece], None] = lambda piece: None
        self.footer: list[str] | None = [] if view else None  # the live view's lines, below the output
        self._drawn = 0  # lines of it on the terminal
        self._draw_at = 0.0
        self._pending = bytearray()  # output that waits for the view's next drawing
        self._lock = threading.Lock()
        self._logs = Logs(folder, self.note) if folder is not None else None
        self._tee = _open_tee(tee) if tee else None
        one_place = view or _same_place(1, 2)
        self._screens = {1: Screen(), 2: Screen()}
        if one_place:
            self._screens[2] = self._screens[1]
        self._given_up = False
        self._gone: set[int] = set()  # descriptors whose reader has left
        self._screen_writer = Writer(self._show, self._on_idle, self._arrived)
        self._writers = [self._screen_writer]
        if self._logs is not None:
            self._writers.append(Writer(self._logs.write, lambda slow, last: None, self._arrived))

    # --- from the launcher

    def take(self, piece: Piece) -> None:
        """A rank wrote something."""
        targets = [w for w in self._writers if w is not self._screen_writer or self.shows(piece.rank)]
        if not targets:
            self.written(piece)
            return
        piece.left = len(targets)
        for writer in targets:
            writer.put(piece)

    def shows(self, rank: int) -> bool:
        return self.shown is None or rank in self.shown

    def note(self, text: str) -> None:
        """Print what the launcher itself has to say."""
        self._screen_writer.put(text)

    def start(self) -> None:
        """Begin to write; there must be no fork by Python from now to `stop`."""
        for writer in [] if self._given_up else self._writers:
            writer.start()

    def stop(self) -> None:
        """Wait until all is written."""
        try:
            for writer in self._writers:
                writer.stop()
        except KeyboardInterrupt:
            self._given_up = True  # somebody does not want to wait for the reader

    def flush(self) -> None:
        """Write what was said since `stop`."""
        self.start()
        self.stop()

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()

    def next_folder(self, folder: str | None) -> None:
        """Log into another folder from now on."""
        if self._logs is not None and folder is not None:
            self._logs.close()
            self._logs.folder = folder

    # --- in the threads

    def _arrived(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            with self._lock:
                piece.left -= 1
                done = not piece.left
            if done:
                self.written(piece)

    def _show(self, items: list[Piece | str]) -> None:
        texts: list[tuple[int, bytes]] = []  # (descriptor, text): what follows on the same one goes out together
        stamp = time.strftime("%H:%M:%S ").encode() if self.timestamps else b""
        for item in items:
            if isinstance(item, str):
                descriptor = 2
                text = self._screens[2].note(item.encode("utf-8", "surrogateescape"))
            else:
                descriptor = 2 if item.stream == "err" else 1
                front = b"%s[%d %s] " % (stamp, item.rank, item.host.encode())
                text = self._screens[descriptor].feed((item.rank, item.stream), front, item.data)
            if texts and texts[-1][0] == descriptor:
                texts[-1] = (descriptor, texts[-1][1] + text)
            else:
                texts.append((descriptor, text))
        self._put(texts)
        self._draw()

    def _on_idle(self, slow: bool, last: bool) -> None:
        if slow:  # the rest of a line may be on its way, and has not been looked at for as long
            for screen in self._screens.values():
                screen.restart_wait()
        if self.footer is None or last:
            now = time.monotonic()
            ends = {d: screen.end() if last else screen.flush(now) for d, screen in self._screens.items()}
            self._put(list(ends.items()))
        self._draw(last)

    def _put(self, texts: list[tuple[int, bytes]]) -> None:
        for descriptor, text in texts:
            if self._tee is not None and text:
                self._write(self._tee, text)
            if self.footer is not None:
                self._pending += text
            elif text:
                self._write(descriptor, text)

    def _draw(self, last: bool = False) -> None:
        """Write what has come, and the view below it: at a fixed rate, whatever the ranks write."""
        now = time.monotonic()
        if self.footer is None or (now < self._draw_at and not last and len(self._pending) < 1 << 20):
            return
        self._draw_at = now + limits.VIEW_SECONDS
        erase = b"\x1b[%dA\x1b[J" % self._drawn if self._drawn else b""
        lines = [] if last else self.footer
        self._drawn = len(lines)
        text, self._pending = bytes(self._pending), bytearray()
        self._write(1, erase + text + "".join(line + "\n" for line in lines).encode("utf-8", "replace"))

    def _write(self, descriptor: int, data: bytes) -> None:
        """All of it, however slow or non-blocking the other end is; nothing once it has gone."""
        if descriptor in self._gone:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:  # somebody else made it non-blocking
                select.select([], [descriptor], [], 1.0)
            except OSError as error:
                # The reader has gone (`| head`), or the disk is full: the job continues, its result may be elsewhere.
                self._gone.add(descriptor)
                if error.errno != errno.EPIPE and descriptor != 2:
                    self._write(2, f"dbrdist-launch: output is cut short here: {error.strerror}\n".encode())
                return


def _same_place(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


def _open_tee(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        print(f"dbrdist-launch: --tee {path!r} cannot be written: {error.strerror}", file=sys.stderr)
        return None


class Logs:
    """A file for each stream of each rank, with its bytes as they came. A disk that is full costs a warning."""

    def __init__(self, folder: str, note: Callable[[str], None]) -> None:
        self.folder, self.note = folder, note
        self._files: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._warned: deque[str] = deque(maxlen=16)

    def write(self, items: list[Piece | str]) -> None:
        for item in items:
            if isinstance(item, Piece):
                try:
                    self._write(self._file(item.rank, item.stream), item.data)
                except OSError as error:
                    self._warn(error.strerror or str(error))

    def _file(self, rank: int, stream: str) -> int:
        key = (rank, stream)
        if key not in self._files:
            if len(self._files) >= limits.OPEN_LOGS:
                os.close(self._files.popitem(last=False)[1])
            path = os.path.join(self.folder, f"rank-{rank}.{stream}")
            self._files[key] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._files.move_to_end(key)
        return self._files[key]

    def _write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.append(why)
            self.note(f"dbrdist-launch: output in {self.folder} is incomplete: {why}")

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
