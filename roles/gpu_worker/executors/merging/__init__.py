"""Models with equal leading layers run them once for a joint batch (Usher section 3.4, its exact part)."""

from roles.gpu_worker.executors.merging.prefix import CannotMerge, Member, PrefixGroup

__all__ = ["CannotMerge", "Member", "PrefixGroup"]
