"""What stands in the place of Python: ``warm_client.py SOCKET [-m module | -c code | script] arguments``.

See `warm.py`. It imports next to nothing, which is the point of it.
"""

import _signal as signal
import _socket
import marshal
import os
import posix
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
SCM_RIGHTS = _socket.SCM_RIGHTS


def main():
    words = sys.argv[2:]
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        really()
    try:
        line, child = started(words)
    except OSError:  # there is no server any more
        really()
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: forward(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # Python's handlers run between its calls: a signal right before this wait would be forwarded at its end.
    line.settimeout(0.25)
    try:
        status = answer(line)
    except OSError:  # the server is gone, and the child with it
        posix._exit(97)
    if status >= 0:
        posix._exit(status)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    posix.kill(posix.getpid(), -status)
    posix._exit(1)


def really():
    """Become Python itself, with what it would have had."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    posix.execv(sys.executable, [sys.executable, *sys.argv[2:]])


def started(words):
    """The line to the server, and the child that it has forked."""
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    place, _, name = sys.argv[1].rpartition("/")
    folder = posix.open(place, posix.O_RDONLY)
    line.connect(f"/proc/self/fd/{folder}/{name}")  # short: the name of a socket has 108 bytes at most
    posix.close(folder)
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != line.fileno():
                posix.fstat(int(name))
                files.append(int(name))
        except OSError:  # that of the listing itself
            continue
    mask = posix.umask(0)
    posix.umask(mask)
    wanted = marshal.dumps((words, os.getcwdb(), dict(posix.environ), files, tuple(posix.sched_getaffinity(0)), mask))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    numbers = b"".join(n.to_bytes(4, sys.byteorder) for n in files)
    line.sendmsg([len(wanted).to_bytes(8, "big")], [(_socket.SOL_SOCKET, SCM_RIGHTS, numbers)])
    left = memoryview(wanted)
    while left:
        left = left[line.send(left) :]
    child = answer(line)
    for number in files:
        posix.close(number)  # whoever waits for their end waits for the child
    return line, child


def forward(child, number):
    try:
        posix.kill(child, number)
    except OSError:  # it is over
        return


def answer(line):
    """A number from the server."""
    got = b""
    while len(got) < 8:
        try:
            part = line.recv(8 - len(got))
        except TimeoutError:
            continue
        if not part:
            raise ConnectionError("the server is gone")
        got += part
    return int.from_bytes(got, "big", signed=True)


main()
