"""Tools for those who write functions, links and samplers, under Chainer's names."""

import sys as _sys

from dbrdist.core.chainer.sparse import CooMatrix as CooMatrix
from dbrdist.core.chainer.sparse import get_order as get_order
from dbrdist.core.chainer.sparse import to_coo as to_coo
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.core.tape import type_check
from dbrdist.utils import argument as argument
from dbrdist.utils.arrays import force_array as force_array
from dbrdist.utils.arrays import force_type as force_type
from dbrdist.utils.arrays import size_of_shape as size_of_shape
from dbrdist.utils.arrays import sum_to as sum_to
from dbrdist.utils.cache import cached_property as cached_property
from dbrdist.utils.conv import get_conv_outsize as get_conv_outsize
from dbrdist.utils.conv import get_deconv_outsize as get_deconv_outsize
from dbrdist.utils.files import tempdir as tempdir
from dbrdist.utils.marks import enable_final as enable_final
from dbrdist.utils.marks import experimental as experimental
from dbrdist.utils.marks import final as final
from dbrdist.utils.marks import nondeterministic as nondeterministic
from dbrdist.utils.walker_alias import WalkerAlias as WalkerAlias

_sys.modules[__name__ + ".type_check"] = type_check

__getattr__ = _explained(__name__)
