"""Several models run together for a joint batch, in one of three ways (Usher section 3.4, ADR 0290)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from roles.gpu_worker.executors.merging.base import CannotMerge, Group, Member
from roles.gpu_worker.executors.merging.operators import OperatorGroup
from roles.gpu_worker.executors.merging.prefix import PrefixGroup
from roles.gpu_worker.executors.merging.stacked import StackedGroup

GROUPS: Final[Mapping[str, Callable[[Mapping[str, Member]], Group]]] = {
    "prefix": PrefixGroup,
    "stacked": StackedGroup,
    "operators": OperatorGroup,
}
"""By the name in `models[].merge`."""
TRACED: Final = frozenset({"stacked", "operators"})
"""Of these, those that trace their members."""

__all__ = [
    "GROUPS",
    "TRACED",
    "CannotMerge",
    "Group",
    "Member",
    "OperatorGroup",
    "PrefixGroup",
    "StackedGroup",
]
