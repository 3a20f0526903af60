"""Runs at the start of the first Python process of a supervised rank, before the program.

It lets the supervisor ask for the stacks of all threads, and tells it of what a process does not show from outside: an
exception that ends the main thread or another one, the size of MPI's world, that the interpreter is ending and with
what code, and that it has ended (what comes then may take forever: MPI_Finalize waits for the other ranks). Telling
changes nothing for the program. Then it makes way for the site's own `sitecustomize`, if there is one.

Any Python may run this: it must be read by old ones too, and what cannot be done there is left out.

Each rank pays for what this imports before its first line: `json`, `signal` and `traceback`, with the regular
expressions and enumerations below them, would cost it 10 ms of processor time.
"""

import atexit
import faulthandler
import io
import os
import sys
import threading

try:
    import _signal as signal  # the same functions; the module around it makes enumerations
except ImportError:  # another Python than CPython
    import signal


_FAULTS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)


def _as_json(value):
    """JSON for a word, a number or a truth."""
    if isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else int.__repr__(value)
    units = str(value).encode("utf-16-be", "surrogatepass")
    codes = (units[at] << 8 | units[at + 1] for at in range(0, len(units), 2))
    plain = (chr(code) if 32 <= code < 127 and code not in (34, 92) else "\\u" + format(code, "04x") for code in codes)
    return '"' + "".join(plain) + '"'


def _last_words(kind, value):
    """`ValueError: text`, as it stands below the traceback.

    After a KeyboardInterrupt nothing is imported: named tuples evaluate text, and whenever Python has done that it no
    longer knows that the program has to end by SIGINT.
    """
    if not issubclass(kind, KeyboardInterrupt):
        try:
            import traceback  # only a program that fails pays for it

            return "".join(traceback.format_exception_only(kind, value)).strip()
        except Exception:  # no file can be opened any more, or another module has this name
            pass
    text = str(value)
    return kind.__name__ + (": " + text if text else "")


def _is_ignored(number):
    """Whether the user has a signal ignored: it stays so."""
    return bool(number) and signal.getsignal(number) == signal.SIG_IGN


class _Teller:
    """Writes events into the supervisor's pipe."""

    def __init__(self, descriptor):
        self.descriptor, self.process = descriptor, os.getpid()
        self.pipe = self._file()
        self.told = False  # that an exception ended the main thread

    def _file(self):
        found = os.fstat(self.descriptor)
        return found.st_dev, found.st_ino

    def tell(self, event, **fields):
        try:
            if os.getpid() != self.process:  # a forked worker; its parent sees its end
                return
            if self._file() != self.pipe:
                return  # the program closed our pipe and has a file of its own under this number
            message = str(fields.pop("message", ""))[:2000]
            text = b"\x1e" * 5000
            while len(text) > 4000:  # a pipe takes 4096 bytes in one piece
                told = dict(fields, event=event, pid=self.process, message=message)
                rows = ", ".join(_as_json(name) + ": " + _as_json(told[name]) for name in told)
                text = ("{" + rows + "}").encode()
                message = message[: len(message) // 2]
            os.write(self.descriptor, b"\x1e" + text + b"\n")
        except (OSError, ValueError):
            pass  # the supervisor has gone: it will have ended this process

    def tell_exception(self, event, kind, value, **fields):
        self.told = self.told or event == "exception"
        try:
            self.tell(event, message=_last_words(kind, value), **fields)
        except Exception:
            pass  # one whose words cannot be had


def _hook_exceptions(teller):
    """Hear of the exceptions that end the main thread or another one.

    The hooks stand where Python's own stood, under both names: a program that compares the two, or that calls
    `sys.__excepthook__` from a hook of its own, finds what it expects. An audit hook would hear of more, but Python
    calls it at every `id()` and `open()`.
    """
    plain = sys.excepthook

    def on_exception(kind, value, trace):
        teller.tell_exception("exception", kind, value)
        plain(kind, value, trace)

    if plain is sys.__excepthook__:
        sys.__excepthook__ = _named_like(plain, on_exception)
    sys.excepthook = on_exception

    previous = getattr(threading, "excepthook", None)

    def on_thread(arguments):
        previous(arguments)
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "?"
            teller.tell_exception("thread", arguments.exc_type, arguments.exc_value, name=name)

    if previous is not None:
        if previous is getattr(threading, "__excepthook__", None):
            threading.__excepthook__ = on_thread
        threading.excepthook = on_thread


def _named_like(plain, function):
    """A function under another one's name, so that it can be pickled and is shown as that."""
    function.__doc__, function.__module__ = plain.__doc__, plain.__module__
    function.__name__, function.__qualname__ = plain.__name__, plain.__qualname__
    return function


class _Exit:
    """What `sys.exit` hangs on its exception: once that is dropped, this says whether it ended the main thread.

    Python drops an exception that nobody caught when no frame is left, and one that was caught while a frame runs.
    Nothing here holds the exception, its frames or what they use.
    """

    def __init__(self, status, codes):
        self.code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        self.codes, self.thread = codes, threading.get_ident()

    def __del__(self):
        try:
            main = threading.main_thread().ident == self.thread == threading.get_ident()
            if main and sys._getframe().f_back is None:
                self.codes.append(self.code)
        except Exception:
            pass  # what this needs has gone: the interpreter has ended

    def __reduce__(self):
        return bool, ()  # an exception that travels to another process leaves this behind


def _hook_exit():
    """Note what `sys.exit` ended the main thread with; a list with the last code."""
    codes = []

    def watched(error):
        try:
            error._dbrdist_exit = _Exit(error.code, codes)
        except Exception:
            pass
        return error

    def exit(status=None):
        arguments = status if isinstance(status, tuple) else () if status is None else (status,)
        raise watched(SystemExit(*arguments))

    sys.exit = _named_like(sys.exit, exit)
    return codes


def _code_of_exit(codes):
    """What the main thread ends with, as far as that is certain: of a chain of exits the last one is dropped first."""
    return 1 if getattr(sys, "last_value", None) is not None else codes[0] if codes else 0


def _mpi():
    """(whether MPI_Finalize will come at the end, size of the world)"""
    module = sys.modules.get("mpi4py.MPI")
    try:
        if module is None or not module.Is_initialized() or module.Is_finalized():
            return False, 0
        return True, module.COMM_WORLD.Get_size()
    except Exception:
        return False, 0


class _World:
    """Finds `mpi4py.MPI` as everybody does, and looks at its world once it is loaded."""

    def __init__(self, teller):
        self.teller = teller

    def find_spec(self, name, path=None, target=None):
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                finalizes, size = _mpi()
                if finalizes:
                    self.teller.tell("world", size=size)

            try:
                spec.loader.exec_module = exec_module
            except AttributeError:
                pass
        return spec


def _hook_end(teller, codes, stack_signal):
    """Tell that the interpreter is ending, with what code, and that it has ended."""

    def leaving():
        finalizes, size = _mpi()
        last = getattr(sys, "last_value", None)
        if last is not None and not teller.told:  # by a hook of the program's own
            teller.tell_exception("exception", type(last), last)
        teller.tell("leaving", code=_code_of_exit(codes), finalizes=finalizes, size=size)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if callable(signal.getsignal(number)):  # a late request must not kill who is just doing what it asks for
                signal.signal(number, signal.SIG_IGN)

    descriptor, process, pipe = teller.descriptor, teller.process, teller.pipe

    class Last:
        """Dropped by the interpreter when nearly nothing else is left of it; what it needs, it brings along."""

        def __del__(
            self, write=os.write, getpid=os.getpid, fstat=os.fstat, errors=(OSError, TypeError, ValueError),
            forget=faulthandler.unregister, handle=signal.signal, ignored=signal.SIG_IGN,
        ):  # fmt: skip
            if getpid() != process:
                return
            try:
                if stack_signal:  # a question that comes now must not kill the process, which Python's handler leaves
                    forget(stack_signal)
                    handle(stack_signal, ignored)
            except errors:
                pass
            try:
                now = fstat(descriptor)
                if (now.st_dev, now.st_ino) == pipe:
                    write(descriptor, b'\x1e{"event": "finished", "pid": %d}\n' % process)
            except errors:
                pass

    atexit.register(leaving)
    sys._dbrdist_last = Last()


def _install(descriptor, stack_signal):
    teller = _Teller(descriptor)
    if _is_ignored(stack_signal):
        stack_signal = 0
    if stack_signal:
        faulthandler.register(stack_signal, file=descriptor, all_threads=True)
    if not faulthandler.is_enabled() and not any(map(_is_ignored, _FAULTS)):
        faulthandler.enable()
    _hook_exceptions(teller)
    _hook_end(teller, _hook_exit(), stack_signal)
    sys.meta_path.insert(0, _World(teller))
    teller.tell("hooks")


class _Whole(io.FileIO):
    """Writes all of it, where a file alone stops at a signal. It has no buffer either: signal handlers may print."""

    def write(self, data):
        count = io.FileIO.write(self, data)
        if count is None or count == getattr(data, "nbytes", None) or (type(data) is bytes and count == len(data)):
            return count
        with memoryview(data) as given, given.cast("B") as left:
            while count < len(left):
                more = io.FileIO.write(self, left[count:])
                if more is None:  # somebody made it non-blocking, and it is full
                    break
                count += more
        return count


def _write_whole_lines():
    """Lines arrive when they are written, also before a SIGKILL, and whole. What the user said of buffering holds.

    Where there is no buffer (`python -u`, PYTHONUNBUFFERED=1), Python ignores that a signal has cut a write short.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if getattr(stream, "write_through", False) and isinstance(stream.buffer, io.FileIO):
            setattr(sys, name, _without_losses(stream))
            setattr(sys, "__" + name + "__", getattr(sys, name))
        elif hasattr(stream, "reconfigure") and not os.environ.get("PYTHONUNBUFFERED"):
            stream.reconfigure(line_buffering=True)


def _without_losses(stream):
    words = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
    stream.flush()
    before = stream.detach()
    whole = _Whole(before.fileno(), "wb", closefd=False)
    whole.name = before.name
    found = io.TextIOWrapper(whole, newline="\n", write_through=True, **words)
    found.mode = "w"
    return found


def _take_back_path():
    """Take our own entry out of PYTHONPATH and `sys.path`: what wrappers put around it stays."""
    here, was_set = os.path.dirname(os.path.abspath(__file__)), os.environ.pop("DBRDIST_LAUNCH_INJECTED", None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    alone = was_set in (None, "unset", "empty")  # we stood in the place of nothing, which is an entry too: the folder
    if here in entries:
        at = entries.index(here)
        entries[at : at + 1] = [""] if alone and len(entries) > 1 else []
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    if not os.environ.get("PYTHONPATH") and was_set == "unset":
        os.environ.pop("PYTHONPATH", None)
    instead = [os.path.abspath("")] if alone and len(entries) > 1 else []
    if here in sys.path:
        at = sys.path.index(here)
        sys.path[at : at + 1] = [entry for entry in instead if entry not in sys.path]
    sys.path[:] = [entry for entry in sys.path if entry != here]


def _start():
    _take_back_path()
    wanted = os.environ.pop("DBRDIST_LAUNCH_EVENTS", None)
    if wanted is not None:
        try:
            descriptor, stack_signal = (int(word) for word in wanted.split(","))
            os.fstat(descriptor)
            os.set_inheritable(descriptor, False)  # the program's own children have no business with it
            _install(descriptor, stack_signal)
            _write_whole_lines()
        except Exception:
            pass  # a wrapper closed the descriptor, or this Python is too old: the program runs without hooks


try:
    _start()
finally:
    _ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401  the site's own
    except ImportError as error:
        sys.modules["sitecustomize"] = _ours  # the import system looks for what it has just run
        if error.name != "sitecustomize":
            raise
