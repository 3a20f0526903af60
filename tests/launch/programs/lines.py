"""Writes many lines in small pieces on both streams, without MPI."""

import sys

for number in range(200):
    for piece in ("line ", f"{number} ", "x" * 50):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
print("to the error output", file=sys.stderr)
sys.stdout.buffer.write(b"not utf-8: \xff\xfe\nno end of line")
