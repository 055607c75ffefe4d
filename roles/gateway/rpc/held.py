"""A message and its share of the budget."""

from __future__ import annotations

from typing import Any

from fabric.errors import RequestError
from roles.gateway.http.limits import BodyBudget


class Held:
    """A message, or why there is none, and the bytes that it has of the budget for as long as anybody holds it."""

    __slots__ = ("_budget", "_message", "_size")

    def __init__(self, message: Any, size: int, budget: BodyBudget) -> None:
        self._message = message
        self._size = size
        self._budget = budget

    @property
    def message(self) -> Any:
        """Raises Overloaded where there was no room for it, InvalidInput where it could not be read."""
        if isinstance(self._message, RequestError):
            raise self._message
        return self._message

    @property
    def request_id(self) -> str:
        """As the client wrote it, where that could be read."""
        return "" if isinstance(self._message, RequestError) else str(self._message.id)

    def __del__(self) -> None:
        self._budget.give_back(self._size)
