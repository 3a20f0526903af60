"""The heavy operations on plain arrays: one interface, several providers."""

from functools import partial
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.elementwise import hand_down_kernel
from dbrdist.core.names.moved import loaded
from dbrdist.kernels import dispatch, host_dispatch, table
from dbrdist.kernels.geometry import ConvGeometry as ConvGeometry
from dbrdist.kernels.geometry import PoolGeometry as PoolGeometry
from dbrdist.kernels.table import provider_of as provider_of
from dbrdist.kernels.table import use as use

if TYPE_CHECKING:
    from dbrdist.kernels.device_dispatch import *  # noqa: F403
    from dbrdist.kernels.dispatch import *  # noqa: F403
    from dbrdist.kernels.fused_dispatch import *  # noqa: F403
    from dbrdist.kernels.host_dispatch import *  # noqa: F403

for _module in (dispatch, host_dispatch):
    globals().update(table.public_names(_module))


def __getattr__(name: str) -> Any:
    """A name of the kernels that only devices have, whose files are loaded when the first such name is read."""
    if not name.startswith("_"):
        for file in ("device_dispatch", "fused_dispatch"):
            names = table.public_names(loaded(f"dbrdist.kernels.{file}"))
            globals().update(names)
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _called(name: str, *arguments: Any) -> Any:
    return (globals().get(name) or __getattr__(name))(*arguments)


for _name in ("mean_of_images", "mean_of_images_backward"):  # for which core asks on devices alone
    hand_down_kernel(_name, partial(_called, _name))
