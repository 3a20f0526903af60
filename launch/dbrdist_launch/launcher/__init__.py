"""The launcher: from the command line to the job's exit code."""

from .moved import serve

serve()
