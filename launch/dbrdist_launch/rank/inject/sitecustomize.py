"""Runs at the start of the first Python process of a supervised rank, before the program.

It lets the supervisor ask for the stacks of all threads, and tells it of what a process does not show from outside: an
exception that ends the main thread or another one, the size of MPI's world, that the interpreter is ending and with
what code, and that it has ended (what comes then may take for ever: MPI_Finalize waits for the other ranks). Telling
changes nothing for the program. Then it makes way for the site's own `sitecustomize`, if there is one.

Any Python may run this: it must be read by old ones too, and what cannot be done there is left out.
"""

import os
import sys


def _install(descriptor, stack_signal):
    import atexit
    import faulthandler
    import json
    import signal
    import threading
    import traceback

    process, pipe = os.getpid(), os.fstat(descriptor)

    def tell(event, **fields):
        if os.getpid() != process:  # a forked worker; its parent sees its end
            return
        try:
            now = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) != (pipe.st_dev, pipe.st_ino):
                return  # the program closed our pipe and has a file of its own under this number
            message = str(fields.pop("message", ""))[:2000]
            text = b"\x1e" * 5000
            while len(text) > 4000:  # a pipe takes 4096 bytes in one piece
                text = json.dumps(dict(fields, event=event, pid=process, message=message)).encode()
                message = message[: len(message) // 2]
            os.write(descriptor, b"\x1e" + text + b"\n")
        except (OSError, ValueError):
            pass  # the supervisor has gone: it will have ended this process

    def words(kind, value):
        return "".join(traceback.format_exception_only(kind, value)).strip()

    def on_audit(event, arguments):
        # Before whatever hook the program has set, and whether it has set one.
        if event == "sys.excepthook":
            try:
                tell("exception", message=words(arguments[1], arguments[2]))
            except Exception:
                pass

    previous_thread_hook, plain_exit = getattr(threading, "excepthook", None), sys.exit

    def thread_hook(arguments):
        previous_thread_hook(arguments)
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "?"
            tell("thread", name=name, message=words(arguments.exc_type, arguments.exc_value))

    asked = []  # what the last sys.exit raised

    def exit(status=None):
        arguments = status if isinstance(status, tuple) else () if status is None else (status,)
        asked[:] = [SystemExit(*arguments)]
        raise asked[0]

    exit.__doc__, exit.__module__, exit.__qualname__ = plain_exit.__doc__, "sys", "exit"  # so it can be pickled

    def code_of_exit():
        """What the main thread ends with, as far as that is certain."""
        if getattr(sys, "last_value", None) is not None:
            return 1
        if asked and _nobody_caught(asked[0].__traceback__):
            status = asked[0].code
            return 0 if status is None else (status & 0xFF) if isinstance(status, int) else 1
        return 0

    def mpi():
        """(whether MPI_Finalize will come at the end, size of the world)"""
        module = sys.modules.get("mpi4py.MPI")
        try:
            if module is None or not module.Is_initialized() or module.Is_finalized():
                return False, 0
            return True, module.COMM_WORLD.Get_size()
        except Exception:
            return False, 0

    def leaving():
        finalizes, size = mpi()
        tell("leaving", code=code_of_exit(), finalizes=finalizes, size=size)
        del asked[:]
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if callable(signal.getsignal(number)):  # a late request must not kill who is just doing what it asks for
                signal.signal(number, signal.SIG_IGN)

    class Last:
        """Dropped by the interpreter when nearly nothing else is left of it; what it needs, it brings along."""

        def __del__(self, write=os.write, getpid=os.getpid, fstat=os.fstat, errors=(OSError, TypeError)):
            try:
                now = fstat(descriptor)
                if getpid() == process and (now.st_dev, now.st_ino) == (pipe.st_dev, pipe.st_ino):
                    write(descriptor, b'\x1e{"event": "finished", "pid": %d}\n' % process)
            except errors:
                pass

    class World:
        """Finds `mpi4py.MPI` as everybody does, and looks at its world once it is loaded."""

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
                    finalizes, size = mpi()
                    if finalizes:
                        tell("world", size=size)

                try:
                    spec.loader.exec_module = exec_module
                except AttributeError:
                    pass
            return spec

    if stack_signal:
        faulthandler.register(stack_signal, file=descriptor, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(on_audit)
    if previous_thread_hook is not None:
        threading.excepthook = thread_hook
    sys.exit = exit
    sys.meta_path.insert(0, World())
    sys._dbrdist_last = Last()
    atexit.register(leaving)
    tell("hooks")


def _nobody_caught(trace):
    """Whether an exit went to the top: the frame that it reached last has done nothing after it."""
    return trace is None or trace.tb_frame.f_lasti == trace.tb_lasti


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
