"""A judge of ranks that are told to it one by one."""

from dbrdist_launch.launcher.judgement.judge import Judge
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Exit

NOW = 1000.0


class Srun:
    """A starter that has ended with a code."""

    name = "srun"
    kills_step = True

    def __init__(self, code=1):
        self.code = code

    def result(self):
        return self.code, 0


def judge(*hosts, lines=(), ended=True, code=1):
    """Ranks 0, 1, ... on hosts; the starter has ended and has said these lines."""
    made = Judge(len(hosts), 10.0, 60.0, 6.0, starter=Srun(code), starter_lines=list(lines))
    made.starter_ended_at = NOW - 0.1 if ended else None
    for number, host in enumerate(hosts):
        made.ranks[number] = Rank(number, host, channel=None, heard_at=NOW)
    return made


def lose(made, rank, at):
    made.ranks[rank].connected, made.ranks[rank].lost_at = False, at


def end(made, rank, at, code=9, signal=0, oom=None):
    made.ranks[rank].ended = at
    made.ranks[rank].early_exit = Exit(code=code, signal=signal, oom=oom, ours=False)
