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
import os
import sys
import threading

try:
    import _signal as signal  # the same functions; the module around it makes enumerations
except ImportError:  # another Python than CPython
    import signal


def _as_json(value):
    """JSON for a word, a number or a truth."""
    if isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else int.__repr__(value)
    units = str(value).encode("utf-16-be", "surrogatepass")
    codes = (units[at] << 8 | units[at + 1] for at in range(0, len(units), 2))
    plain = (chr(code) if 32 <= code < 127 and code not in (34, 92) else "\\u" + format(code, "04x") for code in codes)
    return '"' + "".join(plain) + '"'


def _last_words(kind, value):
    """`ValueError: text`, as it stands below the traceback."""
    try:
        import traceback  # only a program that fails pays for it

        return "".join(traceback.format_exception_only(kind, value)).strip()
    except Exception:  # no file can be opened any more, or another module has this name
        return kind.__name__ + ": " + str(value)


class _Teller:
    """Writes events into the supervisor's pipe."""

    def __init__(self, descriptor):
        self.descriptor, self.process = descriptor, os.getpid()
        self.pipe = self._file()

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
        try:
            self.tell(event, message=_last_words(kind, value), **fields)
        except Exception:
            pass  # one whose words cannot be had


def _hook_exceptions(teller):
    """Hear of the exceptions that end the main thread or another one."""

    def on_audit(event, arguments):
        # Before whatever hook the program has set, and whether it has set one.
        if event == "sys.excepthook":
            teller.tell_exception("exception", arguments[1], arguments[2])

    previous = getattr(threading, "excepthook", None)

    def on_thread(arguments):
        previous(arguments)
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "?"
            teller.tell_exception("thread", arguments.exc_type, arguments.exc_value, name=name)

    if hasattr(sys, "addaudithook"):
        sys.addaudithook(on_audit)
    if previous is not None:
        threading.excepthook = on_thread


def _hook_exit():
    """Note what `sys.exit` raises; a list with the last one."""
    plain, asked = sys.exit, []

    def exit(status=None):
        arguments = status if isinstance(status, tuple) else () if status is None else (status,)
        asked[:] = [SystemExit(*arguments)]
        raise asked[0]

    exit.__doc__, exit.__module__, exit.__qualname__ = plain.__doc__, "sys", "exit"  # so it can be pickled
    sys.exit = exit
    return asked


def _code_of_exit(asked):
    """What the main thread ends with, as far as that is certain."""
    if getattr(sys, "last_value", None) is not None:
        return 1
    if asked and _nobody_caught(asked[0].__traceback__):
        status = asked[0].code
        return 0 if status is None else (status & 0xFF) if isinstance(status, int) else 1
    return 0


def _nobody_caught(trace):
    """Whether an exit went to the top: the frame that it reached last has done nothing after it."""
    return trace is None or trace.tb_frame.f_lasti == trace.tb_lasti


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


def _hook_end(teller, asked):
    """Tell that the interpreter is ending, with what code, and that it has ended."""

    def leaving():
        finalizes, size = _mpi()
        teller.tell("leaving", code=_code_of_exit(asked), finalizes=finalizes, size=size)
        del asked[:]
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if callable(signal.getsignal(number)):  # a late request must not kill who is just doing what it asks for
                signal.signal(number, signal.SIG_IGN)

    descriptor, process, pipe = teller.descriptor, teller.process, teller.pipe

    class Last:
        """Dropped by the interpreter when nearly nothing else is left of it; what it needs, it brings along."""

        def __del__(self, write=os.write, getpid=os.getpid, fstat=os.fstat, errors=(OSError, TypeError)):
            try:
                now = fstat(descriptor)
                if getpid() == process and (now.st_dev, now.st_ino) == pipe:
                    write(descriptor, b'\x1e{"event": "finished", "pid": %d}\n' % process)
            except errors:
                pass

    atexit.register(leaving)
    sys._dbrdist_last = Last()


def _install(descriptor, stack_signal):
    teller = _Teller(descriptor)
    if stack_signal:
        faulthandler.register(stack_signal, file=descriptor, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    _hook_exceptions(teller)
    _hook_end(teller, _hook_exit())
    sys.meta_path.insert(0, _World(teller))
    teller.tell("hooks")


def _write_whole_lines():
    """Each print is one write, where unbuffered each of its words would be one; binary output goes as it is."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _start():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    inherited = os.environ.pop("DBRDIST_LAUNCH_INJECTED_PYTHONPATH", None)
    wanted = os.environ.pop("DBRDIST_LAUNCH_EVENTS", None)
    if inherited is not None:  # the program and its workers see the PYTHONPATH that the user set
        if inherited:
            os.environ["PYTHONPATH"] = inherited
        else:
            os.environ.pop("PYTHONPATH", None)
    if wanted is not None:
        try:
            descriptor, stack_signal = (int(word) for word in wanted.split(","))
            os.fstat(descriptor)
            os.set_inheritable(descriptor, False)  # the program's own children have no business with it
            _install(descriptor, stack_signal)
            if os.environ.pop("DBRDIST_LAUNCH_LINES", None):
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
