"""Tests of dbrdist.utils.argument."""

import pytest

from dbrdist.utils import argument


def test_arguments():
    def function(**kwargs):
        return argument.parse_kwargs(kwargs, ("a", 1), ("b", 2), test="use config.train")

    assert function() == (1, 2) and function(b=5) == (1, 5)
    with pytest.raises(
        TypeError, match=r"function\(\) got unexpected keyword argument\(s\) 'c'; expected one of: a, b"
    ):
        function(c=1)
    with pytest.raises(ValueError, match=r"use config.train"):
        function(test=True)
    argument.assert_kwargs_empty({})
    with pytest.raises(TypeError, match="unexpected arguments 'x', 'y'"):
        argument.assert_kwargs_empty({"y": 1, "x": 2})
