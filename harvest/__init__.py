"""Make any value inside a JAX program visible and replaceable by name."""

from importlib.metadata import version as _version

from . import _rules as _rules
from . import debug as debug
from . import folds as folds
from . import internal as internal
from ._attribute import attribute as attribute
from ._check_types import check_types as check_types
from ._cost import Cost as Cost
from ._cost import SiteCost as SiteCost
from ._edits import add as add
from ._edits import at as at
from ._edits import chain as chain
from ._edits import each as each
from ._edits import indexed as indexed
from ._edits import replace as replace
from ._edits import scale as scale
from ._edits import zero as zero
from ._entry import CondSum as CondSum
from ._eqns import Equation as Equation
from ._eqns import sow_eqns as sow_eqns
from ._errors import DuplicateSiteError as DuplicateSiteError
from ._errors import GradError as GradError
from ._errors import HarvestError as HarvestError
from ._errors import HarvestWarning as HarvestWarning
from ._errors import PlantError as PlantError
from ._errors import ProcessError as ProcessError
from ._errors import SelectError as SelectError
from ._errors import ShardingError as ShardingError
from ._errors import SiteTypeError as SiteTypeError
from ._errors import SowError as SowError
from ._errors import UnknownSiteError as UnknownSiteError
from ._errors import UnsupportedError as UnsupportedError
from ._filter_shard_map import filter_shard_map as filter_shard_map
from ._filters import by_key as by_key
from ._filters import has_spec as has_spec
from ._filters import has_type as has_type
from ._filters import is_replicated as is_replicated
from ._filters import is_varying as is_varying
from ._fold import Fold as Fold
from ._grad import grad as grad
from ._grad import value_and_grad as value_and_grad
from ._grid import grid as grid
from ._grid import per_example as per_example
from ._jvp import jvp as jvp
from ._plant import plant as plant
from ._predicate import Predicate as Predicate
from ._reap import capture as capture
from ._reap import reap as reap
from ._reap import sites as sites
from ._sharded import Sharded as Sharded
from ._show import Line as Line
from ._show import Listing as Listing
from ._show import show as show
from ._site import Axis as Axis
from ._site import Site as Site
from ._sites import Sites as Sites
from ._sow import perturb as perturb
from ._sow import scope as scope
from ._sow import sow as sow
from ._stacked import stacked as stacked
from ._sweep import sweep as sweep
from ._tap import tap as tap

__version__ = _version("jax-harvest")

__all__ = [
    "Axis",
    "CondSum",
    "Cost",
    "DuplicateSiteError",
    "Equation",
    "Fold",
    "GradError",
    "HarvestError",
    "HarvestWarning",
    "Line",
    "Listing",
    "PlantError",
    "Predicate",
    "ProcessError",
    "SelectError",
    "Sharded",
    "ShardingError",
    "Site",
    "SiteCost",
    "SiteTypeError",
    "Sites",
    "SowError",
    "UnknownSiteError",
    "UnsupportedError",
    "add",
    "at",
    "attribute",
    "by_key",
    "capture",
    "chain",
    "check_types",
    "debug",
    "each",
    "filter_shard_map",
    "folds",
    "grad",
    "grid",
    "has_spec",
    "has_type",
    "indexed",
    "is_replicated",
    "is_varying",
    "jvp",
    "per_example",
    "perturb",
    "plant",
    "reap",
    "replace",
    "scale",
    "scope",
    "show",
    "sites",
    "sow",
    "sow_eqns",
    "stacked",
    "sweep",
    "tap",
    "value_and_grad",
    "zero",
]
