"""Does not hear requests to stop."""

import os
import pathlib
import signal
import time

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
(pathlib.Path(os.environ["TEST_FOLDER"]) / "checkpoint.json").touch()
while True:
    time.sleep(1)
