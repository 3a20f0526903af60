"""Waits for what comes first: a descriptor that can be read, a channel that takes more, the next look at the clock."""

from __future__ import annotations

import os
import select

from .channel import Channel
from .inherited import Inherited
from .signals import signal

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable

_READ, _BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT
_READY = ~select.EPOLLOUT  # data, an end or an error, which all show in a read


class Loop:
    """Calls what belongs to each descriptor. Nothing that is called may block."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._calls: dict[int, Callable[[], object]] = {}
        self._channels: dict[int, Channel] = {}
        self._writers: dict[int, Callable[[], object]] = {}  # what is called once, by descriptors that are full
        self.on_wake: Callable[[], None] = lambda: None  # called after each wait, before anything else

    def watch(self, descriptor: int, call: Callable[[], object]) -> None:
        """Call when it can be read, until it is forgotten."""
        if descriptor not in self._calls:
            self._poll.register(descriptor, _READ)
            self._calls[descriptor] = call

    def when_writable(self, descriptor: int, call: Callable[[], object]) -> None:
        """Call once when it takes more; it is none that is watched."""
        if descriptor not in self._writers:
            self._poll.register(descriptor, select.EPOLLOUT)
            self._writers[descriptor] = call

    def forget_writable(self, descriptor: int) -> None:
        if self._writers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def watch_channel(self, channel: Channel, call: Callable[[], None]) -> None:
        """Call when messages have come; what could not be sent goes out when the connection takes it."""
        descriptor = channel.fileno()

        def blocked() -> None:
            if descriptor in self._calls:
                self._poll.modify(descriptor, _BOTH)

        channel.when_blocked = blocked
        self.watch(descriptor, call)
        self._channels[descriptor] = channel
        if channel.unsent:
            blocked()

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._channels.pop(descriptor, None)
            self._poll.unregister(descriptor)

    def turn(self, seconds: float) -> None:
        """Wait at most so long, and call what is due."""
        found = self._poll.poll(max(0.0, seconds))
        self.on_wake()
        for descriptor, ready in found:
            writer = self._writers.get(descriptor)
            if writer is not None:
                self.forget_writable(descriptor)
                writer()
                continue
            channel = self._channels.get(descriptor)
            if channel is not None and ready & select.EPOLLOUT:
                channel.flush()
                if not channel.unsent and descriptor in self._calls:
                    self._poll.modify(descriptor, _READ)
            call = self._calls.get(descriptor)  # an earlier call of this turn may have forgotten it
            if call is not None and ready & _READY:
                call()

    def close(self) -> None:
        self._poll.close()


class Signals:
    """Notes signals, and wakes the loop for them. Those that were ignored stay so: nohup, a job in the background.

    Those that were blocked are not: whoever waits for the end of a child must hear of it.
    """

    def __init__(self, loop: Loop, numbers: tuple[int, ...], call: Callable[[int], None], inherited: Inherited) -> None:
        self.loop, self.call = loop, call
        self.noted: list[int] = []
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda number, _: self.noted.append(number))
            for number in numbers
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD
        }
        inherited.hear(tuple(self._handlers))
        loop.watch(self._read, self._on_wake)

    def _on_wake(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        while self.noted:
            self.call(self.noted.pop(0))

    def close(self) -> None:
        """Put back what was there before."""
        self.loop.forget(self._read)
        signal.set_wakeup_fd(self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
