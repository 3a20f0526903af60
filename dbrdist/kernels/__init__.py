"""The heavy operations on plain arrays: one interface, several providers."""

from typing import TYPE_CHECKING

from dbrdist.kernels import device_dispatch, dispatch, fused_dispatch, host_dispatch, table
from dbrdist.kernels.geometry import ConvGeometry as ConvGeometry
from dbrdist.kernels.geometry import PoolGeometry as PoolGeometry
from dbrdist.kernels.table import provider_of as provider_of
from dbrdist.kernels.table import use as use

if TYPE_CHECKING:
    from dbrdist.kernels.device_dispatch import *  # noqa: F403
    from dbrdist.kernels.dispatch import *  # noqa: F403
    from dbrdist.kernels.fused_dispatch import *  # noqa: F403
    from dbrdist.kernels.host_dispatch import *  # noqa: F403

for _module in (dispatch, device_dispatch, fused_dispatch, host_dispatch):
    globals().update(table.public_names(_module))
