"""The process that has imported everything and forks: ``warm_server.py SOCKET``, see `warm.py`."""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types

PARENT = os.getppid()
PATIENCE_SECONDS = 20  # for a client that has begun to say what it wants
SET_DEATH_SIGNAL = 1  # of prctl(2)
IMPORTED = (
    "numpy", "ml_dtypes", "yaml", "click", "pydantic", "mpi4py", "uuid", "dbrdist.functions", "dbrdist.links",
    "dbrdist.optimizers", "dbrdist.training.extensions", "dbrdist.comm", "dbrdist.compat", "dbrdist.cli.train",
    "concurrent.futures", "multiprocessing", "unittest", "argparse", "dbrdist.models", "dbrdist.datasets",
)  # fmt: skip


def serve(path):
    """Fork for each client; comes back in the children only, with what is wanted."""
    door = socket.socket(socket.AF_UNIX)
    place, name = os.path.split(path)
    folder = os.open(place, os.O_RDONLY)
    door.bind(f"/proc/self/fd/{folder}/{name}")  # short: the name of a socket has 108 bytes at most
    os.close(folder)
    door.listen(64)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    server = os.getpid()
    lines = {}  # of each client that lives: the child that runs for it
    print("ready", flush=True)
    while True:
        found = select.select([0, door, wake, *lines], [], [], 5)[0]
        # A fork of the tests' process may hold the pipe open.
        for ready in found if os.getppid() == PARENT else [0]:
            if ready == 0:  # the tests are over
                end(path, lines.values())
            elif ready is wake:
                wake.recv(4096)
                bury(lines)
            elif ready is door:
                line = door.accept()[0]
                files = []
                try:
                    wanted = taken(line, files)
                    child = os.fork()
                except OSError:  # the client is gone or stuck, or there is no room for a process: it helps itself
                    line.close()
                    child = -1
                if not child:
                    die_with(server)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for own in (door, wake, woken, line, *lines):
                        own.close()
                    return wanted, files
                for number in files:
                    os.close(number)
                if child > 0:
                    lines[line] = child
                    tell(line, child)
            elif ready in lines:  # the client is gone before its child, which has not been waited for yet
                kill(lines.pop(ready))
                ready.close()


def end(path, children):
    """End children, folder and server."""
    for child in children:
        kill(child)
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    os._exit(0)


def kill(child):
    """End a child that nobody has waited for, and what it has started."""
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):  # it ends before it has a group
        os.killpg(child, signal.SIGKILL)


def die_with(server):
    """Have the system end this child with the server, in a group of processes of its own."""
    PRCTL(SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setpgid(0, 0)
    if os.getppid() != server:
        os._exit(1)


def taken(line, files):
    """What a client wants; adds its files."""
    line.settimeout(PATIENCE_SECONDS)
    head, received, _, _ = socket.recv_fds(line, 8, 250)
    files += received
    size, got = int.from_bytes(head, "big"), bytearray()
    while not head or len(got) < size:
        part = line.recv(size - len(got))
        if not part:
            raise ConnectionError("the client is gone")
        got += part
    line.settimeout(None)
    return bytes(got)


def bury(lines):
    """Tell clients whose children have ended how they did."""
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        for line in [line for line, one in lines.items() if one == child]:
            tell(line, os.waitstatus_to_exitcode(status))
            line.close()
            del lines[line]


def tell(line, number):
    with contextlib.suppress(OSError):  # the client was killed
        line.sendall(number.to_bytes(8, "big", signed=True))


# ---- the child ------------------------------------------------------------------------------------------------------


def become(wanted, files):
    """Take the client's place; gives back the words of the command line."""
    words, folder, environ, numbers, cores, mask = marshal.loads(wanted)
    top = max(numbers, default=2) + 1
    far = [fcntl.fcntl(file, fcntl.F_DUPFD, top) for file in files]
    os.closerange(0, top)
    for number, file in zip(numbers, far, strict=True):
        os.dup2(file, number)
    os.closerange(top, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.environ.clear()
    os.environ.update({os.fsdecode(n): os.fsdecode(v) for n, v in environ.items()})
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.umask(mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    fresh_streams()
    numpy.random.seed()  # as in a process of its own; `random` does so by itself
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    sys.orig_argv = [sys.executable, *words]
    comm.mpi._is_forked = False  # no child of a rank, but one itself
    comm.watch._watch.process = os.getpid()
    comm.abort.guard_launched()  # as when the package is imported
    return words


def fresh_streams():
    """Standard streams as Python makes them."""
    is_plain = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name, errors in ((0, "stdin", "strict"), (1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        try:
            raw = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
        except OSError:  # closed
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        binary = io.BufferedReader(raw) if name == "stdin" else raw if is_plain else io.BufferedWriter(raw)
        lines = name == "stderr" or raw.isatty()
        stream = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=is_plain)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def prepared(words):
    """The program as a function, in a module of its own, with arguments and path of modules as Python sets them."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    added += [path for path in STARTING_PATH if path not in added]
    sys.argv = list(words)
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        package, _, name = words[1].rpartition(".")
        if sys.modules.pop(words[1], None) is not None and package:  # as in Python, there is none but `__main__`
            delattr(sys.modules[package], name)
        sys.path[:] = [os.getcwd(), *added]
        return lambda: runpy._run_module_as_main(words[1])
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:] = ["", *added]
        return lambda: exec(compile(words[1], "<string>", "exec"), main.__dict__)
    main.__file__ = os.path.abspath(words[0])
    sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *added]
    with open(words[0], "rb") as file:
        source = file.read()
    return lambda: exec(compile(source, main.__file__, "exec"), main.__dict__)


def shown(trace):
    """What Python would show of it: without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def path_without_additions():
    """Where Python looks for modules without PYTHONPATH: also in the checkout, if that is installed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", r"import sys; print(end='\0'.join(sys.path[1:]))"]
    return subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout.split("\0")


if __name__ == "__main__":
    STARTING_PATH = path_without_additions()
    PRCTL = ctypes.CDLL(None).prctl
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            importlib.import_module(name)
    import numpy

    from dbrdist import comm

    gc.collect()
    gc.freeze()
    program = prepared(become(*serve(sys.argv[1])))
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = shown(error.__traceback__)
        raise
