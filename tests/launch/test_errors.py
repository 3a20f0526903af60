"""The place of an error."""

from dbrdist_launch.errors import LaunchError, place_of


def test_the_place_of_an_error_is_where_it_was_raised():
    def inner():
        raise ValueError("odd")

    try:
        inner()
    except ValueError as error:
        assert place_of(error) == f"{__file__}:{inner.__code__.co_firstlineno + 1}"
    assert place_of(ValueError("never raised")) == "?"
    assert LaunchError("no").code == 2 and str(LaunchError("no", 71)) == "no" and LaunchError("no", 71).code == 71
