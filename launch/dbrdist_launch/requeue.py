"""Puts a Slurm job back into its queue."""

from __future__ import annotations

import os
import subprocess


def requeue() -> str:
    """Ask Slurm to run this job again later; what came of it, in a sentence."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return "--requeue has no effect outside of a Slurm job"
    try:
        child = subprocess.run(
            ["scontrol", "requeue", job], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Slurm job {job} could not be requeued: {error}"
    if child.returncode:
        return f"Slurm job {job} could not be requeued: {child.stderr.strip()}"
    return f"Slurm job {job} is back in the queue"
