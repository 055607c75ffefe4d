"""What the discipline is told of models and slices: the plan, corrected by measured times."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from fabric.ids import ModelId
from fabric.limits import DURATION_MAX_MS, SMALLEST_MS
from fabric.messages import Done, ReplicaInfo, SliceSpec
from policies.batching.base import BatchModel, BatchSlice, Delay, HostedModel
from roles.scheduler.dispatch.corrections import SpeedCorrection, WayCorrection
from roles.scheduler.fleet import Hosting, SliceRecord
from roles.scheduler.settings import SchedulerSettings

DELAY_SHARE_MAX = 0.5  # of the SLO may be reserved for one request's inputs


class Estimates:
    """Models and slices as values for a discipline, and what each `Done` teaches about them."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._slo_ms = {model.model_id: model.slo_ms for model in settings.models}
        self._way = {model_id: self._assumed_way() for model_id in self._slo_ms}
        self._priorities = dict(settings.priorities)
        self._hosted: WeakKeyDictionary[Hosting, dict[tuple[ModelId, ...], tuple[HostedModel, ...]]] = (
            WeakKeyDictionary()
        )
        """Of slices that host alike, by which of their models' batches must not be stopped."""

    def model(self, model_id: ModelId) -> BatchModel:
        """The model, with the way from a decision to its inputs' being there as it was measured."""
        way, slo_ms = self._way[model_id], self._slo_ms[model_id]
        # However long inputs took lately: where nothing may be sent any more, nothing better is learned.
        most_ms = DELAY_SHARE_MAX * slo_ms
        per_item_ms = min(way.ms_per_item, most_ms)
        fixed_ms = min(way.fixed_ms, most_ms - per_item_ms)
        return BatchModel(model_id, slo_ms, Delay(fixed_ms, per_item_ms), self._priorities.get(model_id, 0))

    def put_model(self, model_id: ModelId, slo_ms: float, priority: int | None) -> bool:
        """A model is served from now on, or has another SLO or priority (None: as it is); False: no news."""
        former = self._priorities.get(model_id, 0)
        priority = former if priority is None else priority
        if self._slo_ms.get(model_id) == slo_ms and priority == former:
            return False
        self._slo_ms[model_id], self._priorities[model_id] = slo_ms, priority
        self._way.setdefault(model_id, self._assumed_way())
        self._hosted.clear()
        return True

    @property
    def priorities(self) -> Mapping[ModelId, int]:
        """Of the models that are served."""
        return {model_id: self._priorities.get(model_id, 0) for model_id in self._slo_ms}

    def forget_model(self, model_id: ModelId) -> None:
        """It is no longer told of, though slices may still host it, and batches of it still end."""
        del self._slo_ms[model_id], self._way[model_id]
        self._priorities.pop(model_id, None)
        self._hosted.clear()

    def slice_(self, record: SliceRecord, free_at_ms: float, corrected: ModelId | None = None) -> BatchSlice:
        """The slice, with l(b) as it was measured there. `corrected`: since the last time only this model's was replaced."""
        if corrected is not None:
            record.hosted = tuple(
                [one if one.model_id != corrected else _corrected(record, one) for one in record.hosted]
            )
            return BatchSlice(record.spec.slice_id, record.order, record.hosted, free_at_ms)
        stays = _not_to_stop(record.spec)
        if record.speeds or record.targets or record.leaving:
            record.hosted = self._hosted_models(record, stays)
        else:
            alike = self._hosted.setdefault(record.hosting, {})
            record.hosted = alike.get(stays, ())
            if not record.hosted:
                record.hosted = alike[stays] = self._hosted_models(record, stays)
        return BatchSlice(record.spec.slice_id, record.order, record.hosted, free_at_ms)

    def known_way_ms(self, model_id: ModelId) -> float:
        """What grant and inputs of one request take at a good moment, as was measured; 0 where that is not known yet."""
        return self._way[model_id].known_ms

    def learn_way(self, model_id: ModelId, way_ms: float, batch_size: int) -> bool:
        """Take what grant and inputs took; True when the model's delay has to be replaced."""
        return self._way[model_id].observe(way_ms, batch_size)

    def learn_late(self, model_id: ModelId, waited_ms: float, batch_size: int) -> bool:
        """Take how long a batch's inputs had not come; True when the model's delay has to be replaced."""
        return self._way[model_id].observe_late(waited_ms, batch_size)

    def learn_speed(self, record: SliceRecord, model_id: ModelId, message: Done) -> bool:
        """Take what the run took; True when l(b) of that slice has to be replaced."""
        exec_ms = message.exec_ms
        table = record.hosting.exec_ms.get(model_id, ())
        if message.ran > len(table):
            return False  # sent before the slice said that its batches are smaller now
        table_ms = table[message.ran - 1]
        speed = record.speeds.get(model_id)
        if speed is None:
            if exec_ms == table_ms and not record.speeds:
                return False
            speed = record.speeds[model_id] = SpeedCorrection()
        return speed.observe(exec_ms, table_ms)

    def forget_way(self, model_id: ModelId) -> bool:
        """Nothing of the model ran for a while, and requests are dropped; True when its delay has to be replaced."""
        return self._way[model_id].forget()

    def forget_speed(self, record: SliceRecord, model_id: ModelId) -> bool:
        """The same of a slice; True when l(b) there has to be replaced."""
        speed = record.speeds.get(model_id)
        return speed is not None and speed.forget()

    def _hosted_models(self, record: SliceRecord, stays: tuple[ModelId, ...]) -> tuple[HostedModel, ...]:
        return tuple(
            _hosted_model(record, one, may_stop=one.model_id not in stays)
            for one in record.replicas
            if one.model_id in self._slo_ms and one.model_id not in record.leaving
        )

    def _assumed_way(self) -> WayCorrection:
        delay = self._settings.delay
        return WayCorrection(delay.data_ms_per_item, delay.control_ms + self._settings.transfer_ms)


def _not_to_stop(spec: SliceSpec) -> tuple[ModelId, ...]:
    """The models of a slice whose batches run to their end.

    Real devices cannot stop one, nor can several in a row; and some models must not run a request twice.
    """
    can_stop = spec.device == "emulated" and not spec.following
    return tuple(model.model_id for model in spec.models if not (can_stop and model.is_idempotent))


def _corrected(record: SliceRecord, one: HostedModel) -> HostedModel:
    replica = next(replica for replica in record.replicas if replica.model_id == one.model_id)
    return _hosted_model(record, replica, may_stop=one.may_stop)


def _hosted_model(record: SliceRecord, replica: ReplicaInfo, *, may_stop: bool) -> HostedModel:
    speed = record.speeds.get(replica.model_id)
    factor = 1.0 if speed is None else speed.factor
    exec_ms, interval_ms = _scaled(replica.exec_ms, factor), _scaled(replica.interval_ms, factor)
    target, weight = record.targets.get(replica.model_id, (None, 1.0))
    return HostedModel(replica.model_id, exec_ms, target, weight, interval_ms, may_stop)


def _scaled(times_ms: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """Run times, which never fall, in the bounds of any message: whoever rehearses is told them again."""
    if factor == 1.0 or not times_ms:
        return times_ms
    if times_ms[-1] * factor <= DURATION_MAX_MS and times_ms[0] * factor >= SMALLEST_MS:
        return tuple(ms * factor for ms in times_ms)
    return tuple(min(DURATION_MAX_MS, max(SMALLEST_MS, ms * factor)) for ms in times_ms)
