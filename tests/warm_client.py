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
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(sys.argv[1])
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != line.fileno():
                posix.fstat(int(name))
                files.append(int(name))
        except OSError:  # that of the listing itself
            continue
    wanted = marshal.dumps(
        (sys.argv[2:], os.getcwdb(), dict(posix.environ), files, tuple(posix.sched_getaffinity(0)), posix.umask(0))
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    numbers = b"".join(n.to_bytes(4, sys.byteorder) for n in files)
    line.sendmsg([len(wanted).to_bytes(8, "big")], [(_socket.SOL_SOCKET, SCM_RIGHTS, numbers)])
    left = memoryview(wanted)
    while left:
        left = left[line.send(left) :]
    for number in files:
        posix.close(number)  # whoever waits for their end waits for the child
    child = answer(line)
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: forward(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = answer(line)
    if status >= 0:
        posix._exit(status)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    posix.kill(posix.getpid(), -status)
    posix._exit(1)


def forward(child, number):
    try:
        posix.kill(child, number)
    except OSError:  # it is over
        return


def answer(line):
    """A number from the server; if it is gone, so is the child."""
    got = b""
    while len(got) < 8:
        part = line.recv(8 - len(got))
        if not part:
            posix._exit(97)
        got += part
    return int.from_bytes(got, "big", signed=True)


main()
