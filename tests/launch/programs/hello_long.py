"""Knows nothing of signals."""

import os
import pathlib
import time

(pathlib.Path(os.environ["TEST_FOLDER"]) / "checkpoint.json").touch()
time.sleep(100)
