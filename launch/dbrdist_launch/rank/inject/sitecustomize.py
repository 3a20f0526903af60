"""Runs at the start of the first Python process of a supervised rank, before the program.

It lets the supervisor ask for the stacks of all threads, and tells it of what a process does not show from outside:
an exception that ends the main thread or another one, and that the interpreter is ending (which may take for ever:
MPI_Finalize waits for the other ranks). Then it makes way for the site's own `sitecustomize`, if there is one.
"""

import os
import sys


def _install(descriptor, stack_signal):
    import atexit
    import faulthandler
    import json
    import signal
    import threading
    import time
    import traceback

    process = os.getpid()

    def tell(event, **fields):
        if os.getpid() != process:  # a forked worker; its parent sees its end
            return
        text = json.dumps({"event": event, **fields})[:3000]
        if len(text) == 3000:  # the pipe takes 4096 bytes in one piece
            text = json.dumps({"event": event, "message": str(fields.get("message"))[:1000]})
        try:
            os.write(descriptor, b"\x1e" + text.encode() + b"\n")
        except OSError:
            pass  # the supervisor has gone: it will have ended this process

    def last_line(kind, value):
        return traceback.format_exception_only(kind, value)[-1].strip()

    previous_hook, previous_thread_hook, plain_exit = sys.excepthook, threading.excepthook, sys.exit

    def except_hook(kind, value, trace):
        previous_hook(kind, value, trace)
        tell("exception", message=last_line(kind, value))

    def thread_hook(arguments):
        previous_thread_hook(arguments)
        if arguments.exc_type is not SystemExit:
            name = arguments.thread.name if arguments.thread is not None else "?"
            tell("thread", name=name, message=last_line(arguments.exc_type, arguments.exc_value))

    asked = []  # what the last sys.exit raised, and when

    def exit(status=None, /):
        arguments = status if isinstance(status, tuple) else () if status is None else (status,)
        asked[:] = [SystemExit(*arguments), time.monotonic()]
        raise asked[0]

    exit.__doc__ = plain_exit.__doc__

    def leaving():
        code = 0
        if asked and _went_to_the_top(asked[0].__traceback__, time.monotonic() - asked[1]):
            status = asked[0].code
            code = 0 if status is None else status if isinstance(status, int) else 1
        asked.clear()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if callable(signal.getsignal(number)):  # a late request must not kill who is just doing what it asks for
                signal.signal(number, signal.SIG_IGN)
        tell("leaving", code=code)

    faulthandler.register(stack_signal, file=descriptor, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    sys.excepthook, threading.excepthook, sys.exit = except_hook, thread_hook, exit
    atexit.register(leaving)


def _went_to_the_top(trace, seconds):
    """Whether an exit ended the program. One that nobody handled has no traceback yet, or one from the main module on;
    one that was caught, or passed a `finally`, begins further in: then only the time tells."""
    return trace is None or trace.tb_frame.f_code.co_name in ("<module>", "_run_code") or seconds < 0.2


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
        descriptor, stack_signal = (int(word) for word in wanted.split(","))
        try:
            os.fstat(descriptor)
            _install(descriptor, stack_signal)
        except (OSError, ValueError):
            pass  # a wrapper closed the descriptor: supervision goes on without stacks


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
