"""Which requests of a granted batch go to the worker, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fabric.errors import Overloaded, RequestError, TooLarge
from fabric.frames import PAYLOAD_BYTES_MAX
from fabric.messages import TENSORS_MAX
from roles.frontend.requests import Request


@dataclass(slots=True)
class GrantedPart:
    """This frontend's requests of a batch. `live` go, in order; `missed` are not decoded yet; `unfit` do not fit in, and why."""

    live: list[Request] = field(default_factory=list)
    missed: list[Request] = field(default_factory=list)
    unfit: list[tuple[Request, type[RequestError], str]] = field(default_factory=list)


def part_of(queued: Sequence[Request]) -> GrantedPart:
    """Sort the requests of a grant that are still owed an answer."""
    part = GrantedPart()
    live = part.live
    size_bytes = 0
    for request in queued:
        if not request.is_ready:
            part.missed.append(request)
        elif live and request.tensors != live[0].tensors:
            # Only where a model declares no inputs. Frames are told apart by their number per request.
            part.unfit.append((request, Overloaded, "its batch brought another number of tensors a request"))
        elif (len(live) + 1) * request.tensors > TENSORS_MAX or (
            size_bytes + request.size_bytes > PAYLOAD_BYTES_MAX
        ):  # only there too: a worker announces no batches that cannot be sent
            reason = f"its batch of {len(queued)} is over what one message may hold"
            part.unfit.append((request, TooLarge, reason))
        else:
            live.append(request)
            size_bytes += request.size_bytes
    return part
