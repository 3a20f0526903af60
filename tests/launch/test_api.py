"""Jobs that Python starts, as words of the command line."""

import dbrdist_launch
import pytest
from dbrdist_launch import api


def test_options_become_the_words_of_the_command_line():
    words = api.arguments({
        "ranks": 4, "env": ["A=1", "B"], "quiet": True, "only_env": False, "inject": False, "view": None, "show": "0-1",
        "max_restarts": 3, "port": 0,
    })  # fmt: skip
    assert words == [
        "--ranks", "4", "--env", "A=1", "--env", "B", "--quiet", "--no-inject", "--show-ranks", "0-1",
        "--max-restarts", "3", "--port", "0",
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"run\(\) has no option 'rank'; expected one of backend, .*ranks"):
        api.arguments({"rank": 1})
    assert not hasattr(dbrdist_launch, "nothing") and dbrdist_launch.run is api.run
