"""The report on runs: the page as a file that needs no other, and the curves as PNG where matplotlib is installed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from dbrdist.cli.inspection import page
from dbrdist.cli.inspection.curves import curves
from dbrdist.cli.inspection.records import RunRecord, distinct, read
from dbrdist.cli.output.folder import REPORT
from dbrdist.core.files.serializer import write_atomically
from dbrdist.training import plotting


def write(paths: Sequence[str], pictures: bool = False) -> list[str]:
    """Write the report on one run into its folder, or on several side by side into the first one's; the files' names.

    `pictures` writes the curves of one run as PNG too, where matplotlib is installed.
    """
    runs = distinct([read(path) for path in paths])
    folder = os.path.join(runs[0].path, REPORT)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "index.html" if len(runs) == 1 else "compare.html")
    write_atomically(path, lambda file: file.write(page.render(runs).encode(errors="backslashreplace")))
    return [path, *(_pictures(runs[0], folder) if pictures and len(runs) == 1 else [])]


def _pictures(run: RunRecord, folder: str) -> list[str]:
    """The curves as PNG; none without matplotlib."""
    if not plotting.is_installed():
        return []
    paths = []
    for title, name, series in curves([run]):
        figure, ((axes,),) = plotting.new_figure(1, 1, (7, 4))
        for s in series:
            marker = "o" if len(s.points) == 1 else ""
            plotting.draw_line(axes, s.points, color=s.colour, label=s.name, marker=marker)
        axes.set(title=title.replace("$", r"\$"), xlabel="epoch")  # a name is no formula
        plotting.draw_grid(axes, True)
        if any(s.name for s in series):
            axes.legend()
        paths.append(os.path.join(folder, f"{_short(name)}.png"))
        plotting.save_figure(figure, paths[-1])
    return paths


_MAX_NAME = 200  # bytes; file systems allow 255, and a file is written under a longer name first


def _short(name: str) -> str:
    """A name that a file can have; where it is cut, a checksum of the whole tells it from others."""
    whole = name.encode(errors="surrogateescape")
    if len(whole) <= _MAX_NAME:
        return name
    return f"{whole[:_MAX_NAME].decode(errors='ignore')}_{zlib.crc32(whole):08x}"
