"""One file for each family of primitives; importing this module fills the table of rules."""

from . import _call as _call
from . import _compute_on as _compute_on
from . import _cond as _cond
from . import _custom_derivatives as _custom_derivatives
from . import _jit as _jit
from . import _remat as _remat
from . import _scan as _scan
from . import _shard_map as _shard_map
from . import _while as _while
from . import _xla_metadata as _xla_metadata
