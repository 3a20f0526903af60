"""The process that has imported everything and forks: ``warm_server.py SOCKET``, see `warm.py`."""

import contextlib
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import types

FAR = 500  # descriptors from here on are used by nobody
IMPORTED = (
    "numpy", "ml_dtypes", "yaml", "click", "pydantic", "mpi4py", "uuid", "dbrdist.functions", "dbrdist.links",
    "dbrdist.optimizers", "dbrdist.training.extensions", "dbrdist.comm", "dbrdist.compat", "dbrdist.cli.train",
    "concurrent.futures", "multiprocessing", "unittest", "argparse", "dbrdist.models", "dbrdist.datasets",
)  # fmt: skip


def serve(path):
    """Fork for each client; comes back in the children only, with what is wanted."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(path)
    door.listen(64)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    lines = {}  # of each client that lives: the child that runs for it
    print("ready", flush=True)
    while True:
        for ready in select.select([0, door, wake, *lines], [], [])[0]:
            if ready == 0:  # the tests are over
                for child in lines.values():
                    os.kill(child, signal.SIGKILL)
                os.unlink(path)
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(path))
                os._exit(0)
            elif ready is wake:
                wake.recv(4096)
                bury(lines)
            elif ready is door:
                line = door.accept()[0]
                wanted, files = taken(line)
                child = os.fork()
                if not child:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for own in (door, wake, woken, line, *lines):
                        own.close()
                    return wanted, files
                lines[line] = child
                for number in files:
                    os.close(number)
                tell(line, child)
            elif ready in lines:  # the client is gone before its child, which has not been waited for yet
                os.kill(lines.pop(ready), signal.SIGKILL)
                ready.close()


def taken(line):
    """What a client wants, and its files."""
    head, files, _, _ = socket.recv_fds(line, 8, 250)
    size, got = int.from_bytes(head, "big"), bytearray()
    while len(got) < size:
        part = line.recv(size - len(got))
        if not part:
            break
        got += part
    return bytes(got), files


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
    far = [os.dup2(file, FAR + i) for i, file in enumerate(files)]
    os.closerange(0, FAR)
    for number, file in zip(numbers, far, strict=True):
        os.dup2(file, number)
        os.close(file)
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
    sys.argv = list(words)
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        package, _, name = words[1].rpartition(".")
        if sys.modules.pop(words[1], None) is not None and package:  # as in Python, there is none but `__main__`
            delattr(sys.modules[package], name)
        sys.path[:] = [os.getcwd(), *added, *STARTING_PATH]
        return lambda: runpy._run_module_as_main(words[1])
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:] = ["", *added, *STARTING_PATH]
        return lambda: exec(compile(words[1], "<string>", "exec"), main.__dict__)
    main.__file__ = os.path.abspath(words[0])
    sys.path[:] = [os.path.dirname(os.path.realpath(words[0])), *added, *STARTING_PATH]
    with open(words[0], "rb") as file:
        source = file.read()
    return lambda: exec(compile(source, main.__file__, "exec"), main.__dict__)


def shown(trace):
    """What Python would show of it: without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    STARTING_PATH = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for name in IMPORTED:
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
