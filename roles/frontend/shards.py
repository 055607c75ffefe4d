"""The shards of a cluster as a frontend sees them: the link to each one's schedulers, and whose each model is.

There is no central directory of models. Each shard lists the models that it serves, each with a *term*, which grows when a model is
moved. While a model moves, two shards list it; every frontend then finds by itself, and all in the same way, which of the
two it goes to: one that has slices for it, before one that expects some, before one that does not; then one that is linked; then, of those
that expect some, who has them soonest; then the one of the higher term. To the other it says that it has `Left`, and that shard forgets the
model when all of its frontends have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Directory, HeadInfo, Left, ModelInfo
from roles.frontend.directory import DirectoryChange, Known
from roles.frontend.events import FrontendSettings
from roles.frontend.registration import Registration


@dataclass(slots=True, eq=False)
class ShardLink:
    """One shard: how this frontend stands with its scheduler, and what that said last."""

    number: int
    registration: Registration
    known: Known = field(default_factory=Known)
    elsewhere: set[ModelId] = field(default_factory=set)
    """Models of its directory that another shard serves."""
    left: set[ModelId] = field(default_factory=set)
    """Those of them that it was told we announce elsewhere."""
    has_heard: bool = False
    """It knows what it was told: since then no other scheduler took over, and it was told no hello, which begins anew."""

    @property
    def is_linked(self) -> bool:
        """Whether its scheduler knows us."""
        return self.registration.is_linked


class Rerouted(Struct, frozen=True):
    """What a directory, or a link that came or went, changed.

    `moved`: models that another shard serves now than before, if any did. `removed`: no shard has them any more.
    """

    moved: tuple[ModelId, ...] = ()
    removed: tuple[ModelId, ...] = ()


class Shards:
    """All of them, and which one each model's requests go to; those of its heads go with them."""

    def __init__(self, settings: FrontendSettings, now_ms: float) -> None:
        self.links = tuple(
            ShardLink(number, Registration(settings, now_ms)) for number in range(settings.shards)
        )
        self.models: dict[ModelId, ModelInfo] = {}
        """Of every model, as the shard has it that its requests go to."""
        self.heads: dict[ModelId, ModelInfo] = {}
        """Of every head of these, as clients ask it; where two have it, of the one that counts for more."""
        self._routes: dict[ModelId, ShardLink] = {}
        self._having: dict[ModelId, list[ShardLink]] = {}
        """Whose directory lists a model: one shard, but while it moves."""

    @property
    def is_empty(self) -> bool:
        """Nothing has been heard of any shard yet."""
        for link in self.links:  # noqa: SIM110  asked for every request; a generator costs as much as all the rest
            if not link.known.is_empty:
                return False
        return True

    @property
    def unheard(self) -> tuple[int, ...]:
        """Shards that may have a model that no directory lists: they have not said yet, or are not linked now."""
        if len(self.links) == 1:
            return ()
        return tuple(link.number for link in self.links if link.known.is_empty or not link.is_linked)

    @property
    def wake_at_ms(self) -> float | None:
        """The next hello; None: all are linked."""
        moments = (link.registration.wake_at_ms for link in self.links)
        return min((at_ms for at_ms in moments if at_ms is not None), default=None)

    @property
    def are_linked(self) -> bool:
        """All of them."""
        for link in self.links:  # noqa: SIM110  asked after every event
            if not link.registration.is_linked:
                return False
        return True

    def asked(self, name: ModelId) -> ModelInfo | None:
        """The model or head that clients ask by that name."""
        return self.models.get(name) or self.heads.get(name)

    def of(self, model_id: ModelId) -> ShardLink | None:
        """Where its requests go; None: no shard lists it."""
        return self._routes.get(model_id)

    def open_to(self, model_id: ModelId) -> int | None:
        """The number of the shard that can be told of its requests now."""
        link = self._routes.get(model_id)
        return link.number if link is not None and link.is_linked else None

    def coming_in_ms(self, model_id: ModelId, now_ms: float) -> float | None:
        """Of a model that nothing serves: how long until a slice should be ready, 0 where that has passed; None: none is expected."""
        link = self._routes.get(model_id)
        coming_at_ms = None if link is None else link.known.coming_at_ms.get(model_id)
        return None if coming_at_ms is None else max(0.0, coming_at_ms - now_ms)

    def told(self, now_ms: float) -> Iterator[ModelInfo]:
        """What clients may ask, as it is now: of a slice that is late nobody knows when it will be ready."""
        whole = (info for info in self.models.values() if not info.heads)
        for info in (*whole, *self.heads.values()):
            if info.coming_in_ms is None:
                yield info
            else:
                coming_in_ms = self.coming_in_ms(info.head_of or info.model_id, now_ms)
                yield replace(info, coming_in_ms=coming_in_ms or None)

    def heard(
        self, link: ShardLink, directory: Directory, *, is_listed: bool, now_ms: float
    ) -> tuple[DirectoryChange, Rerouted]:
        """Take a shard's directory. `is_listed`: it links us. Where it does not the caller unlinks."""
        change = link.known.update(directory, now_ms)
        for model_id in change.changed:
            having = self._having.setdefault(model_id, [])
            if link not in having:
                having.append(link)
        for model_id in change.removed:
            self._having[model_id].remove(link)
            link.elsewhere.discard(model_id)
        is_newly_linked = is_listed and not link.is_linked
        link.registration.is_linked = link.is_linked or is_listed
        # Of what is said as before nothing changes, unless where it is said counts for more now.
        said = link.known.models if is_newly_linked else change.changed
        return change, self.reroute((*said, *change.removed))

    def reroute(self, model_ids: Iterable[ModelId]) -> Rerouted:
        """Find anew where these go."""
        moved, removed = [], []
        for model_id in model_ids:
            former = self._routes.get(model_id)
            having = self._having.get(model_id, ())
            link = max(having, key=lambda one: _rank(one, model_id), default=None)
            for other in having:
                (other.elsewhere.discard if other is link else other.elsewhere.add)(model_id)
            if link is not None:
                self._routes[model_id] = link
                self.models[model_id] = link.known.models[model_id]
                if link is not former:
                    moved.append(model_id)
            elif former is not None:
                del self._routes[model_id], self._having[model_id], self.models[model_id]
                removed.append(model_id)
        self._find_heads()
        return Rerouted(tuple(moved), tuple(removed))

    def _find_heads(self) -> None:
        """From all that is listed now: names go from model to model in any order."""
        having = [info for info in self.models.values() if info.heads]
        having.sort(key=lambda one: (_rank(self._routes[one.model_id], one.model_id), one.model_id))
        self.heads = {head.model_id: _as_asked(head, info) for info in having for head in info.heads}

    def untold(self) -> Iterator[tuple[ShardLink, Left]]:
        """What linked shards have yet to hear of the models that they list and others serve."""
        for link in self.links:
            if link.is_linked and not (link.has_heard and link.left == link.elsewhere):
                told = link.elsewhere ^ link.left if link.has_heard else link.elsewhere | link.left
                for model_id in sorted(told):
                    yield link, Left(model_id, is_back=model_id not in link.elsewhere)
                link.left, link.has_heard = set(link.elsewhere), True


def _as_asked(head: HeadInfo, info: ModelInfo) -> ModelInfo:
    return replace(
        info,
        model_id=head.model_id,
        slo_ms=head.slo_ms,
        outputs=head.outputs,
        heads=(),
        head_of=info.model_id,
    )


def _rank(link: ShardLink, model_id: ModelId) -> tuple[bool, bool, bool, float, int, int]:
    """Where no shard that is linked has it ready, a request waits for one that had: it may be back before another one is ready."""
    info = link.known.models[model_id]
    coming_at_ms = link.known.coming_at_ms.get(model_id)
    is_expected = coming_at_ms is not None
    return info.replicas > 0, is_expected, link.is_linked, -(coming_at_ms or 0.0), info.term, -link.number
