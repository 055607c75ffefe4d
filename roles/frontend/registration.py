"""Which scheduler a frontend goes by, and whether that one knows it.

The frontend is *linked* while the scheduler's directory lists this incarnation of it. Otherwise it says hello until that does.
Of several schedulers it goes by the one with the highest epoch: a scheduler has one only while a majority of the agents
has granted it.
"""

from __future__ import annotations

from typing import Final

from fabric.messages import FrontendHello
from roles.frontend.events import FrontendSettings

HELLO_AGAIN_MS: Final = 20.0
"""After the first hello, which a broken connection does not take: it is back about as soon. Each wait is twice the one before, up to `hello_every_ms`."""


class Registration:
    """Of one frontend, with one scheduler after the other, from `now_ms` on."""

    def __init__(self, settings: FrontendSettings, now_ms: float) -> None:
        self.is_linked = False
        self.epoch = 0
        self.scheduler = 0
        """The number of the one that has that epoch."""
        self.generation = 0
        """Higher each time that a scheduler was given up, or us: who granted something in a lower one says nothing of it any more."""
        self._settings = settings
        self._begin(now_ms)

    @property
    def hello(self) -> FrontendHello:
        """Who it is."""
        settings = self._settings
        return FrontendHello(
            settings.frontend_id, settings.incarnation, settings.addresses, is_linked=self.is_linked
        )

    @property
    def wake_at_ms(self) -> float | None:
        """The next hello; None while it is linked."""
        return None if self.is_linked else self._hello_at_ms

    def follow(self, scheduler: int, epoch: int, now_ms: float) -> bool:
        """Go by this one, which begins an epoch, and say hello; whether it is another one than before."""
        is_another, self.scheduler = scheduler != self.scheduler, scheduler
        self.epoch = epoch
        self._begin(now_ms)
        return is_another

    def unlink(self, now_ms: float) -> bool:
        """It does not know us, or is gone: say hello from now on. Whether it was linked."""
        was_linked, self.is_linked = self.is_linked, False
        self.generation += 1
        if was_linked:
            self._begin(now_ms)
        return was_linked

    def hello_if_unlinked(self, now_ms: float) -> FrontendHello | None:
        """What to say while it is not linked, and it is time again."""
        return None if self.is_linked else self._hello_if_due(now_ms)

    def hello_if_doubted(self, now_ms: float) -> FrontendHello | None:
        """What to say to a scheduler that may have forgotten us, though it is linked; it answers with a directory."""
        if not self.is_linked:
            return None
        self._wait_ms = self._settings.hello_every_ms
        return self._hello_if_due(now_ms)

    def _begin(self, now_ms: float) -> None:
        self._hello_at_ms, self._wait_ms = now_ms, HELLO_AGAIN_MS

    def _hello_if_due(self, now_ms: float) -> FrontendHello | None:
        if now_ms < self._hello_at_ms:
            return None
        self._hello_at_ms = now_ms + self._wait_ms
        self._wait_ms = min(2.0 * self._wait_ms, self._settings.hello_every_ms)
        return self.hello
