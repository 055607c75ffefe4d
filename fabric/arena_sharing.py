"""Which tensors of a sender lie in shared memory instead of travelling."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.clock import Clock
from fabric.link import NamedTensor
from fabric.shared_memory import Arena


class ArenaSharing:
    """An arena made when the first tensor needs it, for tensors of at least so many bytes.

    Where there is no room for one, or the system gives no memory, it has no place and travels.
    """

    def __init__(self, bytes_max: int, tensor_bytes_min: int, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        self._tensor_bytes_min = tensor_bytes_min
        self._arena: Arena | None = None
        self._is_refused = False

    def share(self, tensors: Sequence[NamedTensor]) -> None:
        """Let the large ones lie in shared memory. Raises LocalProtocolError for a dtype that has no raw form."""
        for tensor in tensors:
            if tensor.place is None and tensor.array.nbytes >= self._tensor_bytes_min:
                arena = self._opened()
                if arena is not None:
                    from fabric.tensors import share  # noqa: PLC0415  NumPy: who never has tensors does without

                    share(tensor, arena)

    def close(self) -> None:
        """Readers keep what they have open."""
        if self._arena is not None:
            self._arena.close()
            self._arena, self._is_refused = None, True  # tensors that lie in it keep it

    def _opened(self) -> Arena | None:
        if self._arena is None and not self._is_refused:
            try:
                self._arena = Arena(self._bytes_max, self._clock)
            except OSError:
                self._is_refused = True
        return self._arena


def lend(tensors: Sequence[NamedTensor]) -> None:
    """Their request ends, and a worker may read them yet: see `Region.lend`."""
    for tensor in tensors:
        if tensor.place is not None:
            tensor.place.lend()
