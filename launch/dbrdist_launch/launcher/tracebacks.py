"""Finds the traceback among the last lines that a program wrote to its error output."""

_STARTS = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_FATAL = "Fatal Python error:"


def last_traceback(lines: list[str]) -> tuple[str, str] | None:
    """(text, last line) of the last Python traceback, or of the stacks that faulthandler wrote; None without one.

    Lines of other origin between those of the traceback cannot be told apart and stay in the text.
    """
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at].lstrip("| +-")
        if line.startswith(_FATAL):
            return "\n".join(lines[at:]).rstrip(), lines[at].strip()
        if line.startswith(_STARTS):
            end = _message_at(lines, at)
            return "\n".join(lines[at : end + 1]), lines[end].strip()
    return None


def _message_at(lines: list[str], start: int) -> int:
    """Index of the line `ValueError: text` that closes the traceback beginning at `start`."""
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace() and not line.startswith(("|", "+")):
            return at
    return len(lines) - 1
