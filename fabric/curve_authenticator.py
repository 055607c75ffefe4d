"""Who answers ZeroMQ's question whether a key may connect: a thread of pyzmq's, one for each context."""

from __future__ import annotations

import atexit
import os
from functools import cache

import zmq
from zmq.auth.thread import ThreadAuthenticator


@cache
def authenticator_of(context: zmq.Context[zmq.Socket[bytes]]) -> _Authenticator:
    """A context's one, for ZeroMQ asks in one place; it ends with the process."""
    made = _Authenticator(context)
    made.start()
    atexit.register(_stop, made, os.getpid())
    return made


os.register_at_fork(after_in_child=authenticator_of.cache_clear)


class _Authenticator(ThreadAuthenticator):
    """Pyzmq's, but whoever is refused by a PULL may ask again, when it may be known.

    ZeroMQ gives a connection up for good that is refused with 400, and its owner is told; not so with 300. A DEALER of ours looks
    whether it was told, and begins anew; a PUSH does not. (ZeroMQ does not say under which name a connection comes, so names are
    checked with each message.)
    """

    _is_told = True  # by the link that is being asked for: this thread does one after the other

    async def _authenticate_curve(self, domain: str, client_key: bytes) -> tuple[bool, bytes]:
        self._is_told = getattr(self.credentials_providers.get(domain), "names", True)
        return await super()._authenticate_curve(domain, client_key)

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        if status_code == b"400" and not self._is_told:
            status_code = b"300"
        super()._send_zap_reply(request_id, status_code, status_text, user_id)


def _stop(made: _Authenticator, pid: int) -> None:
    if os.getpid() == pid:  # a fork has no such thread, and would wait for it
        made.stop()
