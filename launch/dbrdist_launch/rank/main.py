"""Entry of a rank: `python .../rank/main.py BACKEND ADDRESS ...`, which mpiexec or srun start in the program's place.

Two processes stand around the program. The outer one is what mpiexec knows; mpiexec may kill it at any time (it does
when a rank calls MPI_Abort). The inner one, in a session of its own, sees that, still reads the program's last words,
reports how it really ended, and leaves nothing behind. If the inner one is killed, the kernel kills the program.

What to run comes from the launcher: among mpiexec's own words a `:` would begin another program. The words after the
address are for people who look at the list of processes. Python compiles this file at each start, so it is short.
"""

import os
import sys

if __name__ == "__main__" and not __package__:  # run by its path: `python -I -S rank/main.py` starts fastest
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    __package__ = "dbrdist_launch.rank"
    packed = ()  # see bundle.py; without a whole bundle of this very Python the modules come from their files
    if sys.argv[2:] and sys.argv[2].startswith("unix:"):
        try:
            from _frozen_importlib_external import MAGIC_NUMBER  # of CPython
            from marshal import loads

            with open(os.path.dirname(sys.argv[2][5:]) + "/modules", "rb", 0) as file:
                packed = loads(file.read()) if file.read(len(MAGIC_NUMBER)) == MAGIC_NUMBER else ()
        except (ImportError, OSError, EOFError, ValueError, TypeError):
            pass
    if packed:
        exec(*packed)

from dbrdist_launch.rank.outer import main

if __name__ == "__main__":
    main(sys.argv[1:])
