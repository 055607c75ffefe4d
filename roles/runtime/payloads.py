"""Where a shell keeps tensors while its core only holds handles of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from fabric.arena_sharing import lend
from fabric.link import NamedTensor
from roles.runtime.core import NO_PAYLOAD, Handle


class Payloads:
    """Tensors by handle, with their bytes counted. Nothing is copied: what is kept are views of frames."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_kept = 0
        self._kept: dict[Handle, Sequence[NamedTensor]] = {}
        self._numbers = count(NO_PAYLOAD + 1)

    def put(self, tensors: Sequence[NamedTensor]) -> Handle | None:
        """Keep tensors; None when that would pass `bytes_max` (nothing is kept then).

        No tensors is a payload too: it takes a handle and no bytes.
        """
        size_bytes = _bytes_of(tensors)
        if self.bytes_kept + size_bytes > self.bytes_max:
            return None
        self.bytes_kept += size_bytes
        handle = Handle(next(self._numbers))
        self._kept[handle] = tensors
        return handle

    def keep(self, handle: Handle, tensors: Sequence[NamedTensor]) -> None:
        """Keep tensors under a handle that the core has chosen: below 0, so that it is none of ours. May pass `bytes_max`."""
        assert handle < NO_PAYLOAD, "not one of ours"
        assert handle not in self._kept, "used once"
        self.bytes_kept += _bytes_of(tensors)
        self._kept[handle] = tensors

    def get(self, handle: Handle) -> Sequence[NamedTensor]:
        """The tensors of a handle that was put and not released."""
        return self._kept[handle]

    def replace(self, handle: Handle, tensors: Sequence[NamedTensor]) -> None:
        """Swap the tensors behind a handle (a decoded picture for its file). May pass `bytes_max`."""
        self.bytes_kept += _bytes_of(tensors) - _bytes_of(self._kept[handle])
        self._kept[handle] = tensors

    def release(self, handle: Handle, *, may_be_read: bool = False) -> None:
        """Forget a handle; releasing `NO_PAYLOAD` or one twice is nothing. `may_be_read`: by who knows their place in shared memory."""
        tensors = self._kept.pop(handle, None)
        if tensors is not None:
            self.bytes_kept -= _bytes_of(tensors)
            if may_be_read:
                lend(tensors)

    def __contains__(self, handle: Handle) -> bool:
        """Whether it was put and not released; any thread may ask."""
        return handle in self._kept

    def __len__(self) -> int:
        return len(self._kept)


def _bytes_of(tensors: Sequence[NamedTensor]) -> int:
    return sum(tensor.array.nbytes for tensor in tensors)
