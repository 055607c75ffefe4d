"""What is no defect of a model: that a batch needs more memory than there is."""

from __future__ import annotations

import torch

from fabric.errors import error_text


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the host."""
    # The CPU allocator has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in error_text(
        error
    )
