"""Requests that a browser sends for somebody else's page, which has no token, and needs none where none is asked for.

Such a page may ask without reading the answer, across sites, or be of a site whose name was made to lead here (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fabric.policy_options import shown
from roles.gateway.failures import Refused
from roles.gateway.http.messages import Head
from roles.runtime.host_header import host_named

_ITS_OWN: Final = ("none", "same-origin")
"""What `Sec-Fetch-Site` says where no other site has to do with it."""


def check_not_cross_site(head: Head, own: Collection[str]) -> None:
    """Raises Refused for what a page of another site asks. `own`: the hosts under which we may be asked. Every browser says which one it asks."""
    host = head.headers.get("host")
    if host is not None and host_named(host) not in own:
        names = " or ".join(sorted(own))
        raise Refused(
            f"this is not {shown(host)}: without cluster.gateway.token_file the gateway is asked as {names}"
        )
    if "origin" in head.headers or head.headers.get("sec-fetch-site", "none").lower() not in _ITS_OWN:
        raise Refused(
            "without cluster.gateway.token_file no page may ask the gateway; its server may, without the header Origin"
        )
