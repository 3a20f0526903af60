"""Tests of dbrdist.comm.steps.delegation."""

from dbrdist.comm.steps import delegation


def test_what_a_wrapped_optimizer_is_told():
    told = []

    class Told:
        def __getattr__(self, name):
            return lambda *args: told.append((name, *args))

    outer = delegation.HandsOn(Told())
    outer.loss_scaling()
    outer.loss_scaling(5, 2.0)
    outer.new_epoch()
    outer.new_epoch(True)
    outer.add_hook("hook")
    outer.call_hooks()
    outer.set_loss_scale(4.0)
    outer.remove_hook("a")
    assert told == [
        ("loss_scaling", 1000, None), ("loss_scaling", 5, 2.0), ("new_epoch", False), ("new_epoch", True),
        ("add_hook", "hook", None, "auto"), ("call_hooks", "pre"), ("set_loss_scale", 4.0), ("remove_hook", "a"),
    ]  # fmt: skip
