"""Parameters, links and chains, and the flat memory in which parameters are stored."""
