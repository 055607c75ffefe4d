"""Makes `import torchvision` work where torch has no CUDA; does nothing where torchvision is whole.

torchvision's wheel is built for CUDA. On a CPU-only torch its compiled library cannot be loaded, so the operators
that library would register are missing, and torchvision's own Python code, which attaches a shape rule to two
of them at import, stops with "operator torchvision::nms does not exist". transformers imports torchvision as
soon as it is installed, so all its model classes fail with it. Declaring the two operators' schemas, without
any kernel, is all the import needs. Models that classify never call them; `torchvision.ops` still answers with
torchvision's own error.
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")


@cache  # the cache keeps the library alive: its declarations vanish with it
def declare_missing_operators() -> torch.library.Library | None:
    """Call before the first import of torchvision or transformers, in every process. None: nothing to declare."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    # A whole torchvision must register its operators itself, and before us: a second declaration is refused.
    for compiled in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(compiled)  # type: ignore[no-untyped-call]
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in missing:
        library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    return library
