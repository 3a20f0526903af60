"""Facts of a host in order, as the doctor gathers them."""

import contextlib
import io
import json

from dbrdist_launch.doctor.findings import Findings

FACTS = {
    "host": "a",
    "shm_bytes": 8 << 30,
    "shm_free_bytes": 8 << 30,
    "files": 65536,
    "memlock": -1,
    "gpus": 0,
    "cores": 8,
    "infiniband": [],
    "fork_safe": None,
    "python": "3.11.7",
    "executable": "/v/bin/python",
    "packages": {"numpy": "2.4"},
    "system": "Linux 6",
    "interfaces": [
        {"name": "eth0", "address": "10.0.0.1", "speed": 1000},
        {"name": "ib0", "address": "10.1.0.1", "speed": 100000},
    ],
}


def said(check, *arguments):
    """(level, title) of each finding of a check, with all its text."""
    findings = Findings()
    with contextlib.redirect_stdout(io.StringIO()):
        check(findings, *arguments)
    return [(entry["level"], entry["title"]) for entry in findings.entries], json.dumps(findings.entries)
