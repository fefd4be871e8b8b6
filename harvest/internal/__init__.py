"""Semi-public: how harvest is taught a primitive of your own."""

from .._entry import Entry as Entry
from .._interpreter import Inside as Inside
from .._rule import Rule as Rule
from .._rule import register_rule as register_rule

__all__ = ["Entry", "Inside", "Rule", "register_rule"]
