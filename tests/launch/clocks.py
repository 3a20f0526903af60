"""Clocks that tests set, and channels that keep what is sent."""

import time

import support

STEP = 2.0**-10


class Clock:
    """A monotonic clock that stands still until it is told to go on."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.pass_by)

    def pass_by(self, seconds):
        self.now += max(0.0, seconds)


class Channel:
    """Keeps what is sent; receives what the test puts in."""

    def __init__(self):
        self.sent, self.inbox, self.is_closed, self.unsent = [], [], False, b""

    def send(self, message):
        self.sent.append(support.told(message))

    def receive(self):
        return self.inbox

    def close(self):
        self.is_closed = True

    def watch_peer(self, seconds):
        self.peer_seconds = seconds

    def fileno(self):
        return -1

    def kinds(self):
        return [kind for kind, _ in self.sent]
