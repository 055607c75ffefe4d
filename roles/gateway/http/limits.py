"""What a connection may take, in bytes and in time. Each of them is somebody's way to hold a server up (slow-loris and kin)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_ROOM_FOR_BODY: Final = "the bodies of other requests take all the room there is"
NO_ROOM_FOR_ANSWER: Final = "bodies and answers of others take all the room there is for this one"


@dataclass(slots=True, frozen=True)
class HttpLimits:
    """Bounds of HTTP connections; times in ms.

    A head must be whole `head_ms` after its first byte, or after the connection began. A body may take `body_ms`, and as long
    as it would at `bytes_per_s_min`; an answer likewise, for a client that reads slowly.
    """

    connections_max: int = 1_024
    head_bytes_max: int = 16 << 10  # the size at which nginx and Node.js stop too
    headers_max: int = 100
    body_bytes_max: int = 64 << 20
    bodies_bytes_max: int = 1 << 30
    """Of all connections together, while they come in and while they are asked about, and answers that are not read yet."""
    head_ms: float = 10_000.0
    body_ms: float = 10_000.0
    bytes_per_s_min: float = 16_384.0
    answer_ms: float = 30_000.0
    idle_ms: float = 75_000.0
    linger_ms: float = 2_000.0
    """After a refusal the rest of what comes is thrown away so long: who still sends would lose the answer."""
    pipelined_max: int = 16
    """Requests that wait on one connection while one is answered."""
    at_once_max: int = 32
    """Requests that came together and are begun together, where each is answered at once: others' requests wait meanwhile."""

    def body_limit_ms(self, received_bytes: int) -> float:
        """How long a body may have taken when so much of it is here."""
        return self.body_ms + received_bytes / self.bytes_per_s_min * 1e3

    def answer_limit_ms(self, size_bytes: int) -> float:
        """How long a client may take to read that much."""
        return self.answer_ms + size_bytes / self.bytes_per_s_min * 1e3


class BodyBudget:
    """The bytes of bodies and of answers that all connections hold together."""

    def __init__(self, bytes_max: int, whole: BodyBudget | None = None) -> None:
        """`whole`: of which this one is a part."""
        self._left = bytes_max
        self._bytes_max = bytes_max
        self._whole = whole

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._bytes_max - self._left

    def half(self) -> BodyBudget:
        """What is taken of it is taken of this one too: others have at least as much room for themselves."""
        return BodyBudget(self._bytes_max // 2, self)

    def take(self, size: int) -> bool:
        """False: there is no room, and nothing was taken."""
        if size > self._left or (self._whole is not None and not self._whole.take(size)):
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """They are gone."""
        self._left += size
        if self._whole is not None:
            self._whole.give_back(size)
