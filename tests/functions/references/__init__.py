"""What each public function computes, written a second time from its published definition in plain NumPy.

Names and arguments are those of ``dbrdist.functions``; nothing here imports dbrdist. The formulas are the plainest ones
(loops over windows and labels, sums in float64), so that they share no trick, and no mistake, with the code they judge.
``tests/contracts/functions/test_references.py`` compares every row of ``cases.py`` and every entry of ``points.py``
with them.

Legend: N examples, K classes, C channels, O outputs, H W rows and columns, D further axes.
"""

from __future__ import annotations

from .algebra import *  # noqa: F403
from .arrays import *  # noqa: F403
from .attention import *  # noqa: F403
from .labelled import *  # noqa: F403
from .losses import *  # noqa: F403
from .nets import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .regions import *  # noqa: F403
from .special import *  # noqa: F403
from .whitening import *  # noqa: F403
from .windows import *  # noqa: F403
