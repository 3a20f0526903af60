"""Where the ranks' output goes: to the screen, the rank in front of each line, and as it is into a file per stream.

Each place is written by a thread of its own: stdout, stderr (unless both are the same file), --tee, the logs. Where a
reader is slow, or a disk, its thread waits; nothing else does, and a rank is told to continue writing only when its
last piece has arrived everywhere. So no byte is lost and none piles up.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection

from ... import limits
from .logs import Logs
from .pieces import SPAWNED, Echo, Folder, Item, Piece, Shown
from .view import columns

_ENDS = re.compile(rb"((?>\r\n|\n|\r))(?!\Z)")
_CONTROL = rb"[\x00-\x08\x0b-\x1f\x7f]"  # what a terminal echoes as ^A


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


class OutputWriter:
    """Writes in a thread what it is handed, in order; `write` makes the bytes and puts them where they belong."""

    def __init__(
        self,
        write: Callable[[list[Item]], None],
        idle: Callable[[bool, bool], None],  # called often, with: whether the write was slow, whether it was the last
        done: Callable[[list[Piece]], None],
    ) -> None:
        self._write, self._idle, self._done = write, idle, done
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def start(self) -> None:
        if self._thread is None:
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
            pieces = [item.piece if isinstance(item, Shown) else item for item in kept]
            self._done([piece for piece in pieces if isinstance(piece, Piece)])
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
        log_bytes: int | None = None,  # of one log file
        logs_kept: int = 1,
    ) -> None:
        self.shown, self.timestamps = shown, timestamps
        self.written: Callable[[Piece], None] = lambda piece: None
        self.footer: list[str] | None = [] if view else None  # the live view's lines, below the output
        self._drawn: list[str] = []  # its lines on the terminal
        self._host = os.uname().nodename  # of rank 0, once it has written something
        self._echoed = 0  # lines that the terminal itself has added below them
        self._draw_at = 0.0
        self._pending = bytearray()  # output that waits for the view's next drawing
        self._lock = threading.Lock()
        self._logs = Logs(folder, self.note, log_bytes, logs_kept) if folder is not None else None
        self._tee_file = _open_tee(tee) if tee else None
        one_place = view or _same_place(1, 2)
        self._screens = {1: Screen(), 2: Screen()}
        if one_place:
            self._screens[2] = self._screens[1]
        self._given_up = False
        self._gone: set[int] = set()  # descriptors whose reader has left
        self._screen_writers = {1: self._screen_writer((1, 2) if one_place else (1,))}
        self._screen_writers[2] = self._screen_writers[1] if one_place else self._screen_writer((2,))
        self._writers = list(dict.fromkeys(self._screen_writers.values()))
        self._tee: OutputWriter | None = None
        if self._tee_file is not None:
            self._tee = OutputWriter(self._write_tee, lambda slow, last: None, self._arrived)
            self._writers.append(self._tee)  # after those who write to it
        self._log_writer: OutputWriter | None = None
        if self._logs is not None:
            self._log_writer = OutputWriter(self._logs.write, lambda slow, last: None, self._arrived)
            self._writers.append(self._log_writer)

    def _screen_writer(self, descriptors: tuple[int, ...]) -> OutputWriter:
        return OutputWriter(self._show, lambda slow, last: self._on_idle(slow, last, descriptors), self._arrived)

    # --- from the launcher

    def take(self, piece: Piece) -> None:
        """A rank wrote something."""
        shown = self.shows(piece.rank)
        targets = [self._screen_writers[2 if piece.stream == "err" else 1]] if shown else []
        targets += [self._log_writer] if self._log_writer is not None else []
        piece.left = len(targets) + (shown and self._tee is not None)  # to which the screen's thread hands it on
        if not targets:
            self.written(piece)
        for writer in targets:
            writer.put(piece)

    def shows(self, rank: int) -> bool:
        return self.shown is None or rank in self.shown or (rank == SPAWNED and bool(self.shown))

    def note(self, text: str) -> None:
        """Print what the launcher itself has to say."""
        self._screen_writers[2].put(text)

    def echo(self, data: bytes) -> None:
        """Something was typed for rank 0: with a view it becomes a part of the output, which the view stands below."""
        if self.footer is not None:
            self._screen_writers[1].put(Echo(data))

    def start(self) -> None:
        """Begin to write."""
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
        if self._log_writer is not None and folder is not None:
            self._log_writer.put(Folder(folder))

    # --- in the threads

    def _arrived(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            with self._lock:
                piece.left -= 1
                done = not piece.left
            if done:
                self.written(piece)

    def _show(self, items: list[Item]) -> None:
        texts: list[tuple[int, bytes]] = []  # (descriptor, text): what follows on the same one goes out together
        stamp = time.strftime("%H:%M:%S ").encode() if self.timestamps else b""
        for item in items:
            if isinstance(item, str):
                descriptor = 2
                text = self._screens[2].note(item.encode("utf-8", "surrogateescape"))
                self._hand_to_tee(text, None)
            elif isinstance(item, Piece):
                descriptor = 2 if item.stream == "err" else 1
                self._host = item.host if item.rank == 0 else self._host
                who = b"spawned" if item.rank == SPAWNED else b"%d" % item.rank
                front = b"%s[%s %s] " % (stamp, who, item.host.encode())
                text = self._screens[descriptor].feed((item.rank, item.stream), front, item.data)
                self._hand_to_tee(text, item)
            elif isinstance(item, Echo):
                descriptor, shown = 1, re.sub(_CONTROL, lambda match: b"^%c" % (match[0][0] ^ 64), item.data)
                front = b"%s[0 %s] " % (stamp, self._host.encode())
                text = self._screens[1].feed((0, "out"), front, shown) if self.shows(0) else b""
                self._echoed += _rows(shown)
            else:
                continue
            if texts and texts[-1][0] == descriptor:
                texts[-1] = (descriptor, texts[-1][1] + text)
            else:
                texts.append((descriptor, text))
        self._put(texts)
        self._draw()

    def _hand_to_tee(self, text: bytes, piece: Piece | None) -> None:
        if self._tee is not None and (text or piece is not None):
            self._tee.put(Shown(text, piece))

    def _write_tee(self, items: list[Item]) -> None:
        assert self._tee_file is not None
        self._write(self._tee_file, b"".join(item.text for item in items if isinstance(item, Shown)))

    def _on_idle(self, slow: bool, last: bool, descriptors: tuple[int, ...]) -> None:
        if slow:  # the rest of a line may be on its way, and has not been looked at for as long
            for descriptor in descriptors:
                self._screens[descriptor].restart_wait()
        if self.footer is None or last:
            now = time.monotonic()
            for descriptor in descriptors:
                screen = self._screens[descriptor]
                text = screen.end() if last else screen.flush(now)
                self._hand_to_tee(text, None)
                self._put([(descriptor, text)])
        self._draw(last)

    def _put(self, texts: list[tuple[int, bytes]]) -> None:
        for descriptor, text in texts:
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
        size = shutil.get_terminal_size()  # which may be another than at the last drawing
        rows = sum(max(1, -(-columns(line) // size.columns)) for line in self._drawn) + self._echoed
        self._echoed = 0
        erase = b"\x1b[%dF\x1b[J" % min(rows, size.lines) if rows else b""
        lines = [] if last else self.footer
        self._drawn = lines
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
                    where = "the file of --tee" if descriptor == self._tee_file else "output"
                    self._write(2, f"dbrdist-launch: {where} is cut short here: {error.strerror}\n".encode())
                return


def _rows(text: bytes) -> int:
    """How many lines of the terminal the ended lines of a text take."""
    width = shutil.get_terminal_size().columns
    lines = text.decode("utf-8", "replace").expandtabs().split("\n")[:-1]
    return sum(max(1, -(-columns(line) // width)) for line in lines)


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
