"""Where the hooks of ranks lie."""

from support import ROOT

INJECT = str(ROOT / "launch" / "dbrdist_launch" / "rank" / "inject")
