"""Cuts a stream of bytes into lines."""

MAX_LINE_BYTES = 1 << 16  # a longer one is cut: a binary stream must not fill the memory


class LineSplitter:
    """Bytes in, whole lines out. Of what carriage returns overwrite (progress bars), the last piece counts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines completed by `data`, without their ends; bytes that are not UTF-8 survive as surrogates."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def end(self) -> list[str]:
        """What stood after the last line's end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    line = line.rstrip(b"\r")
    return line.rpartition(b"\r")[2].decode("utf-8", "surrogateescape")
