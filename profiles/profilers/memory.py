"""What is no defect of a model: that a batch needs more memory than there is."""

from __future__ import annotations

import contextlib
from typing import Final

import torch

from fabric.errors import error_text

# Only torch's own allocator has an error class: what CUDA and its libraries are refused is told in words, and so is the CPU's.
_OF_HOST: Final = ("DefaultCPUAllocator",)
_OF_DEVICE: Final = (
    "CUDA error: out of memory",
    "ALLOC_FAILED",  # CUBLAS_STATUS_…, CUDNN_STATUS_…
    "ALLOCATION_FAILED",  # cuDNN 9
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS allocates as it starts
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the host."""
    return is_out_of_device_memory(error) or isinstance(error, MemoryError) or _says(error, _OF_HOST)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Whoever asked for it: torch, or CUDA and its libraries."""
    return isinstance(error, torch.OutOfMemoryError) or _says(error, _OF_DEVICE)


def empty_cache() -> None:
    """Give a GPU back what torch keeps and nobody uses; nothing where it cannot, as in a broken context."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(word in error_text(error) for word in words)
