"""Dynamic placement: the plan follows models, GPUs and rates while everything serves (design section 6).

One thing at a time: a plan is asked for (`make_plan.py`, in a process of its own), its moves are carried out wave by wave
(`running_move.py`), and only then is the next change looked at. Reasons to plan anew, in this order:

- the file is another one than the plan that runs was made for (`carried_over.py`);
- the last frontend has gone to another shard with a model that the file gives to that one;
- an operator adds, removes or sets models, or drains a GPU;
- GPUs went or came (`usable_gpus.py`);
- a plan or its moves were given up;
- a measured rate has drifted (`measured_rates.py`, `planned_rates.py`; gpulet's thresholds and period);
- a slice broke its promise and its GPU has room: it alone is replaced by a larger one (iGniter's shadow process).

A move that fails is rolled back, later waves are not begun, and nothing is tried again by itself for a while. Then what was
given up is planned again, after twice as long each time: whatever it was for may still be so. That plan follows drifted rates too, so
they wait for it. Of a slice that could not grow only its GPU is left alone for a while.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from fabric.ids import ModelId, PeerId, SliceId
from fabric.messages import (
    LEAVING_TERM,
    Changed,
    CurrentSlice,
    DrainAsked,
    GpuRef,
    KeptSlice,
    ModelAdvice,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    MoveInfo,
    NewSlice,
    PlanAsked,
    PlanChange,
    PlanMade,
    PlanReport,
    SectionAsked,
    UnplacedInfo,
)
from policies.placement.common.base import WHOLE_PERCENT
from roles.runtime.core import PLANNER
from roles.scheduler.dispatch.estimates import Estimates
from roles.scheduler.dispatch.run_time_watch import RunTimeWatch
from roles.scheduler.fleet import Fleet
from roles.scheduler.measured_rates import MeasuredRates
from roles.scheduler.planning.actuator import Actuator
from roles.scheduler.planning.desired_state import (
    BUSY,
    INVALID_CONFIG,
    ChangeRefused,
    ControllerSettings,
    Desired,
    PlannedRate,
)
from roles.scheduler.planning.leaving_models import LeavingModels
from roles.scheduler.planning.planned_rates import PlannedRates
from roles.scheduler.planning.running_move import MoveState, RunningMove
from roles.scheduler.planning.slice_names import SliceNames
from roles.scheduler.planning.usable_gpus import GpuPresence
from roles.scheduler.settings import SchedulerSettings

LOOK_EVERY_MS = 500.0  # iGniter's half second
LOADS_EVERY_MS = 1_000.0
MOVING_EVERY_MS = 20.0  # how soon a drained slice is noticed
NUDGE_MS = 1.0
REPLAN_EVERY_MS = 20_000.0  # gpulet's period, for rates
REST_AFTER_FAILURE_MS = 30_000.0
AGAIN_MS_MAX = 16 * REST_AFTER_FAILURE_MS
GROWTH_PERCENT = 10.0  # iGniter: its largest prediction error
GROWTH_REST_MS = 10_000.0  # of one GPU: what a larger slice does to its neighbours must show first
CHANGES_MAX = 16
LATELY_MAX = 16
UNLOGGED_MAX = 256


class _Growth(NamedTuple):
    """A slice that is to be replaced by a larger one."""

    slice_id: SliceId
    gpu: GpuRef
    share_percent: float


@dataclass(slots=True)
class _Task:
    """A reason to plan, until its moves are over. `change` with its operator, where it is one's; `absent`: GPUs that are away."""

    why: str
    desired: Desired
    peer: PeerId | None
    change: PlanChange | None
    grown: _Growth | None
    absent: frozenset[GpuRef]
    before: Desired
    slo_before_ms: float
    rates: Mapping[ModelId, PlannedRate]
    rates_before: Mapping[ModelId, PlannedRate]
    unplaced_before: tuple[UnplacedInfo, ...]


class SettledPlan(NamedTuple):
    """What to go on from in another process. `number`: of the reasons to plan that were dealt with."""

    number: int
    settings: SchedulerSettings
    planning: ControllerSettings


class Controller:
    """See the module. Its messages are in `actuator`; `due_at_ms` is when it wants its next `tick`."""

    def __init__(
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        estimates: Estimates,
        actuator: Actuator,
        loads: MeasuredRates,
        run_time_watch: RunTimeWatch,
        names: SliceNames,
        begun_with: Callable[[], SchedulerSettings],
    ) -> None:
        """`begun_with`: what a scheduler would start with that goes on from here."""
        self.due_at_ms = 0.0
        self.unlogged: deque[str] = deque(maxlen=UNLOGGED_MAX)
        """What it did since somebody looked, for a log."""
        self._fleet = fleet
        self._estimates = estimates
        self._actuator = actuator
        self._loads = loads
        self._run_time_watch = run_time_watch
        self.settled = 0
        """How many reasons to plan were dealt with, one way or the other."""
        self._begun_with = begun_with
        self._set_aside: SettledPlan | None = None
        """The one that was settled last, as it was when what is under way began."""
        self._presence = GpuPresence(settings.desired.gpus, settings.absent)
        self._made_without = settings.absent
        """GPUs that were away when the plan that runs was asked for."""
        self._is_rate_blind = settings.is_rate_blind
        self._is_carried_over = settings.is_carried_over
        self._desired = settings.desired
        self._rates = PlannedRates(settings.rates, settings.desired.declared_rps, loads)
        self._changes: deque[tuple[PeerId, PlanChange]] = deque()
        self._task: _Task | None = None
        self._asked_number = 0
        self._is_planning = False
        self._made = PlanMade(0, unplaced=settings.unplaced)
        self._moves: list[RunningMove] = []
        self._are_gpus_changed = False
        self._replan_at_ms: float | None = None
        self._rests_until_ms = 0.0
        self._again_after_ms = REST_AFTER_FAILURE_MS
        """Twice as long after each plan in a row that came to nothing."""
        self._again_at_ms: float | None = 0.0 if settings.is_given_up else None
        self._grown_until_ms: dict[GpuRef, float] = {}
        self._look_at_ms = 0.0
        self._loads_at_ms = 0.0
        self._moves_done = self._moves_failed = 0
        self._lately: deque[str] = deque(maxlen=LATELY_MAX)
        self._names = names
        self._leaving = LeavingModels(fleet, actuator)

    # ------------------------------------------------------------ events

    def tick(self, now_ms: float) -> None:
        """Look at loads, GPUs and promises, and go on with what is under way."""
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_EVERY_MS
            if self._loads_at_ms <= now_ms:
                self._loads_at_ms = now_ms + LOADS_EVERY_MS
                if self._replan_at_ms is None:
                    self._replan_at_ms = now_ms + REPLAN_EVERY_MS
                gpus = len(set(self._desired.gpus) - self._out)
                self._loads.look(self._fleet.replicas, self._actuator.queued, gpus, now_ms)
                if self._presence.look(self._fleet, now_ms):
                    self._are_gpus_changed = True
        self._go_on(now_ms)

    @property
    def is_moving(self) -> bool:
        """Whether slices are being started and ended."""
        return bool(self._moves)

    def nudge(self, now_ms: float) -> None:
        """Slices have changed: go on in a moment, in which others of the same node may change too."""
        if self._moves:
            self.due_at_ms = min(self.due_at_ms, now_ms + NUDGE_MS)

    def asked(self, peer: PeerId, change: PlanChange, now_ms: float) -> None:
        """An operator wants something changed. It is answered when that is over."""
        if len(self._changes) + len(self._leaving) >= CHANGES_MAX:
            reason = f"{CHANGES_MAX} changes wait for their turn already"
            self._actuator.send(peer, Changed(change.request_no, "refused", BUSY, reason))
            return
        if isinstance(change, ModelsRemove) and change.when_left:
            self._leaving.add(peer, change, now_ms)
        else:
            self._changes.append((peer, change))
        self._go_on(now_ms)

    def section(self, asked: SectionAsked) -> Changed:
        """A model's section, so that another shard can serve it as it is served here."""
        found = self._desired.section(asked.model_id)
        if isinstance(found, ChangeRefused):
            return Changed(asked.request_no, "refused", found.code, found.reason)
        placed_rps = self._rates.placed_rps(asked.model_id)
        rate = {} if placed_rps is None else {"rate_rps": placed_rps}
        document = json.dumps({**found, **rate, "term": self._fleet.terms.get(asked.model_id, 0)})
        return Changed(asked.request_no, "ok", document=document)

    def frontend_left(self, now_ms: float) -> None:
        """A frontend has gone to another shard with a model: that may have been the last one."""
        self._go_on(now_ms)

    def planned(self, made: PlanMade, now_ms: float) -> None:
        """The planner has answered."""
        if self._is_planning and made.number == self._asked_number and self._task is not None:
            self._is_planning = False
            self._accept(self._task, made, now_ms)
            self._go_on(now_ms)

    @property
    def is_steady(self) -> bool:
        """Whether nothing is under way."""
        return self._task is None

    def settled_plan(self) -> SettledPlan:
        """The one that was settled last: what an operator was told is in it, whatever has begun since."""
        if self._set_aside is None or self._set_aside.number != self.settled:
            self._set_aside = SettledPlan(self.settled, self._begun_with(), self.settings())
        return self._set_aside

    def settings(self) -> ControllerSettings:
        """To go on from here in another process, when nothing is under way."""
        hints = tuple(KeptSlice(slice_id, record.hints) for slice_id, record in self._fleet.slices.items())
        return ControllerSettings(
            self._desired,
            hints,
            self._is_rate_blind,
            self._made.unplaced,
            self._is_carried_over,
            self._rates.planned,
            self._made_without,
            is_given_up=self._again_at_ms is not None,
        )

    def settings_played(self) -> ControllerSettings:
        """The same for a simulator, which is told of no node: what is not there counts as drained."""
        return replace(self.settings(), desired=replace(self._desired, drained=self._out))

    def report(self) -> PlanReport:
        """For people."""
        gpus = len(set(self._desired.gpus) - self._out)
        advice = self._loads.advice()
        rates = self._loads.rates_rps()
        state = "steady" if self.is_steady else "planning" if self._is_planning else "moving"
        models = tuple(
            ModelAdvice(
                model_id,
                rates.get(model_id, 0.0),
                self._rates.placed_rps(model_id),
                advice.models.get(model_id, 0.0),
            )
            for model_id in self._fleet.replicas
        )
        return PlanReport(
            state,
            "" if self._task is None else self._task.why,
            gpus,
            advice.gpus or gpus,
            models,
            self._moves_done,
            self._moves_failed,
            self._made.unplaced,
            tuple(self._lately),
            tuple(sorted(self._desired.drained, key=lambda ref: (ref.node_id, ref.gpu))),
        )

    @property
    def _out(self) -> frozenset[GpuRef]:
        return self._desired.drained | self._presence.absent

    def _note(self, text: str) -> None:
        self.unlogged.append(text)
        self._lately.append(text[:500])

    def _go_on(self, now_ms: float) -> None:
        """With what is under way; or begin with what is next."""
        if self._moves:
            self._move_on(now_ms)
        self._changes.extend(self._leaving.take(now_ms))
        if self._task is None:
            self._next(now_ms)
        is_soon = self._moves or self._leaving
        self.due_at_ms = min(self._look_at_ms, now_ms + MOVING_EVERY_MS if is_soon else self._look_at_ms)

    # ------------------------------------------------------------ reasons to plan

    def _next(self, now_ms: float) -> None:
        if self._is_carried_over and now_ms >= self._rests_until_ms:
            self.settled_plan()  # is set aside before anything of it is changed
            wanted = set(self._desired.model_ids)
            self._actuator.remove_models([one for one in self._fleet.replicas if one not in wanted], now_ms)
            self._ask("the file has changed", self._desired)
        elif leaving := tuple(filter(self._has_gone, self._desired.model_ids)):
            self._remove(ModelsRemove(0, leaving), self._desired.without(leaving), None, now_ms)
        while self._changes and self._task is None:
            self._begin_change(*self._changes.popleft(), now_ms)
        if self._task is not None or now_ms < self._rests_until_ms:
            return
        if self._are_gpus_changed:
            self._are_gpus_changed = False
            gone = ", ".join(sorted(ref.name for ref in self._presence.absent))
            self._ask(f"GPUs went or came (away: {gone or 'none'})", self._desired)
        elif self._again_at_ms is not None:
            if self._again_at_ms <= now_ms:
                self._ask("what was given up", self._desired)
        elif self._replan_at_ms is not None and self._replan_at_ms <= now_ms and not self._is_rate_blind:
            drifted = self._rates.drifted(self._desired)
            if drifted:
                self._replan_at_ms = now_ms + REPLAN_EVERY_MS
                self._ask(f"the rate of {', '.join(drifted)} has drifted", self._desired)
        if self._task is None:
            self._grow_broken(now_ms)

    def _has_gone(self, model_id: ModelId) -> bool:
        """Whether it was served here only until another shard's frontends had it there."""
        is_leaving = self._fleet.terms.get(model_id) == LEAVING_TERM
        return is_leaving and self._fleet.is_left(model_id) and not self._actuator.queued(model_id)

    def _begin_change(self, peer: PeerId, change: PlanChange, now_ms: float) -> None:
        if isinstance(change, ModelsRemove) and change.when_left and self._leaving.still_used(change):
            self._leaving.add(peer, change, now_ms)  # a frontend came back meanwhile
            return
        desired = self._desired.changed(change)
        if isinstance(change, ModelsRemove) and self._is_moved_back(change):
            desired = ChangeRefused(BUSY, f"{', '.join(change.model_ids)} was moved back here meanwhile")
        if isinstance(desired, ChangeRefused):
            self._actuator.send(peer, Changed(change.request_no, "refused", desired.code, desired.reason))
            return
        if (
            isinstance(change, ModelSet)
            and (change.slo_ms, change.rate_rps) == (None, None)
            and not change.dry_run
        ):
            self._begin_term(peer, change, desired, now_ms)
            return
        if isinstance(change, ModelsRemove) and not change.dry_run:
            self._remove(change, desired, peer, now_ms)
        else:
            self._ask(_described(change), desired, peer, change)

    def _remove(self, change: ModelsRemove, desired: Desired, peer: PeerId | None, now_ms: float) -> None:
        """Their requests are refused from now on, whatever the plan will be."""
        self.settled_plan()  # is set aside before anything of it is changed
        model_ids = dict.fromkeys(change.model_ids)  # it may name one twice
        self._actuator.remove_models(model_ids, now_ms)
        for model_id in model_ids:
            self._rates.forget(model_id)
        self._desired = desired
        self._ask(_described(change), desired, peer, change)

    def _is_moved_back(self, change: ModelsRemove) -> bool:
        """Whether somebody else moves it too. Where both did, each would remove it where the other one wants it."""
        terms = {self._fleet.terms.get(one, 0) for one in change.model_ids if one in self._fleet.replicas}
        return change.term is not None and bool(terms - {change.term})

    def _begin_term(self, peer: PeerId, change: ModelSet, desired: Desired, now_ms: float) -> None:
        """Nothing is to be planned for that."""
        self._desired = desired
        self.settled += 1
        if change.term is not None:
            self._actuator.put_term(change.model_id, change.term, now_ms)
            self._note(f"{change.model_id} is served here, in term {change.term}")
        self._actuator.send(peer, Changed(change.request_no, "ok", kept=len(self._fleet.slices)))

    def _grow_broken(self, now_ms: float) -> None:
        broken = self._run_time_watch.broken(now_ms)
        if not broken:
            return
        granted = self._fleet.granted_percent()
        for slice_id, ratio in sorted(broken.items(), key=lambda item: -item[1]):  # the worst first
            record = self._fleet.slices.get(slice_id)
            if record is None or not record.takes_batches or self._task is not None:
                continue
            gpu = GpuRef(record.node_id, record.spec.gpu)
            if now_ms < self._grown_until_ms.get(gpu, 0.0):
                continue
            self._grown_until_ms[gpu] = now_ms + GROWTH_REST_MS
            late = f"slice {slice_id} ran {100 * (ratio - 1):.0f} % longer than promised"
            share, free = record.spec.share_percent or WHOLE_PERCENT, WHOLE_PERCENT - granted[gpu]
            if free <= 0:
                self._note(f"{late}: its GPU has no share left")
                continue
            grown = share + min(GROWTH_PERCENT, free)
            why = f"{late}: {grown:g} % instead of {share:g} %"
            self._ask(why, self._desired, grown=_Growth(slice_id, gpu, grown))

    # ------------------------------------------------------------ one plan

    def _ask(
        self,
        why: str,
        desired: Desired,
        peer: PeerId | None = None,
        change: PlanChange | None = None,
        grown: _Growth | None = None,
    ) -> None:
        self.settled_plan()  # is set aside before anything of it is changed
        target = self._rates.target(desired, self._desired)
        task = self._task = _Task(
            why,
            desired,
            peer,
            change,
            grown,
            self._presence.absent,
            self._desired,
            self._fleet.slo_ms(change.model_id) if isinstance(change, ModelSet) else 0.0,
            target,
            self._rates.planned,
            self._made.unplaced,
        )
        self._asked_number += 1
        self._is_planning = True
        self._note(f"planning: {task.why}")
        current = tuple(
            CurrentSlice(
                slice_id,
                record.node_id,
                record.spec.gpu,
                record.spec.share_percent,
                record.hints,
                sum(model.memory_bytes for model in record.spec.models),
                record.spec.following,
            )
            for slice_id, record in self._fleet.slices.items()
        )
        out = sorted(task.desired.drained | task.absent, key=lambda ref: (ref.node_id, ref.gpu))
        rates = {str(model_id): rate.placed_rps for model_id, rate in target.items()}
        asked = PlanAsked(
            self._asked_number, task.desired.document, task.desired.base_dir, current, rates, tuple(out)
        )
        if task.grown is not None:
            asked = replace(asked, grown=task.grown.slice_id, share_percent=task.grown.share_percent)
        self._actuator.send(PLANNER, asked)

    def _accept(self, task: _Task, made: PlanMade, now_ms: float) -> None:
        if task.change is not None and task.change.dry_run:
            self._told(task, made)
            return
        if reason := made.reason or self._objection(task, made):
            status = "failed" if isinstance(task.change, ModelsRemove) else "refused"
            self._give_up(task, status, INVALID_CONFIG, reason, now_ms)
            return
        if isinstance(task.change, ModelsAdd):
            task.desired = _with_declared(task.desired, task.change, made)
        if task.grown is not None:
            made = replace(made, unplaced=task.unplaced_before)  # nothing was placed anew
        self._desired, self._made = task.desired, made
        self._actuator.put_models(zip(made.models, map(int, made.priorities), strict=True), now_ms)
        for kept in made.kept:
            record = self._fleet.slices.get(kept.slice_id)
            if record is not None:
                self._actuator.hint(record, kept.hints, now_ms)
        if task.grown is None:
            self._rates.settle(made.rates_rps, task.rates)
        self._moves = [self._running(move) for move in made.moves]
        if not self._moves:
            self._finish(task, now_ms)

    def _told(self, task: _Task, made: PlanMade) -> None:
        """What would be done, and nothing of it."""
        self._task = None
        assert task.peer is not None, "it is an operator's"
        assert task.change is not None, "likewise"
        number = task.change.request_no
        if reason := made.reason or self._objection(task, made):
            answer = Changed(number, "refused", INVALID_CONFIG, reason)
        else:
            answer = _answered(task, made, made.moves)
        self._note(f"planned only: {task.why}")
        self._actuator.send(task.peer, answer)

    def _objection(self, task: _Task, made: PlanMade) -> str:
        """Where a drift of rates (gpulet) or its own new SLO leaves a model that is served without a place, the old plan stays.

        Not where GPUs have gone since that was made: then something may have to go.
        """
        change = task.change
        if isinstance(change, ModelSet):
            if change.slo_ms is None or change.is_forced:
                return ""
            model_id, slo_ms = change.model_id, change.slo_ms
            if model_id in self._lost(made):
                why = next((f": {one.reason}" for one in made.unplaced if one.model_id == model_id), "")
                why = f"would have no place{why}"
            else:
                why = self._why_never_met(model_id, slo_ms)
            return why and f"{model_id} is served, and {why}; --force sets it all the same"
        if change is not None or task.absent - self._made_without or self._is_carried_over:
            return ""
        lost = self._lost(made)
        return f"the new plan has no place for {', '.join(lost)}: the old plan stays" if lost else ""

    def _why_never_met(self, model_id: ModelId, slo_ms: float) -> str:
        """Of a model's SLO, by what was measured where it runs: real devices have no profile that placement could look at. Empty: it may be met."""
        found = [record.exec_ms(model_id, 1) for record in self._fleet.slices.values() if record.is_ready]
        exec_ms = min((one for one in found if one is not None), default=0.0)
        way_ms = self._estimates.known_way_ms(model_id)
        if exec_ms + way_ms <= slo_ms:
            return ""
        way = f", and its way there takes {way_ms:.3g} ms" if way_ms else ""
        return (
            f"a single request runs for {exec_ms:.3g} ms{way}: an SLO of {slo_ms:g} ms is below {exec_ms + way_ms:.3g} ms,"
            " the least that could be met"
        )

    def _lost(self, made: PlanMade) -> list[ModelId]:
        """Models that are served, and that a plan has no place for."""
        hosted = {hint.model_id for move in made.moves for one in move.starts for hint in one.hints}
        hosted |= {hint.model_id for move in made.moves for one in move.changes for hint in one.hints}
        hosted |= {hint.model_id for kept in made.kept for hint in kept.hints}
        return [
            model_id for model_id, count in self._fleet.replicas.items() if count and model_id not in hosted
        ]

    def _running(self, move: MoveInfo) -> RunningMove:
        starts = [self._named(start) for start in move.starts]
        return RunningMove(move, starts, self._names.order_of, self._named, self._presence)

    def _named(self, start: NewSlice) -> NewSlice:
        """Under an id that is not one of those that a former scheduler had just begun either."""
        there = self._fleet.devices.get(start.node_id)
        return self._names.named(start, frozenset() if there is None else there.slice_ids)

    # ------------------------------------------------------------ moves

    def _move_on(self, now_ms: float) -> None:
        task = self._task
        assert task is not None, "moves belong to a task"
        while True:
            waves = [move.move.wave for move in self._moves if not move.is_over]
            if not waves:
                break
            has_failed = any(move.stage is MoveState.FAILED for move in self._moves)
            if has_failed and not any(move.is_begun and not move.is_over for move in self._moves):
                break
            before = [move.stage for move in self._moves]
            for move in self._moves:
                if move.move.wave == min(waves) and not move.is_over and (move.is_begun or not has_failed):
                    self._advance(move, now_ms)
            if [move.stage for move in self._moves] == before:
                return
        self._finish(task, now_ms)

    def _advance(self, move: RunningMove, now_ms: float) -> None:
        stage = move.stage
        move.advance(self._fleet, self._actuator, now_ms)
        if move.stage is stage:
            return
        match move.stage:
            case MoveState.DONE:
                self._moves_done += 1
                self._note(f"moved: {_described_move(move)}")
            case MoveState.FAILED:
                self._moves_failed += 1
                self._note(f"rolled back: {_described_move(move)}: {move.reason}")
            case MoveState.ROLLING_BACK:
                self._note(f"a move fails: {move.reason}")

    def _finish(self, task: _Task, now_ms: float) -> None:
        moves, self._moves = self._moves, []
        failed = [move for move in moves if move.stage is not MoveState.DONE]
        if failed:
            reason = next((move.reason for move in failed if move.reason), "")
            if task.grown is None and any(move.is_begun for move in moves):  # their GPUs may be in use by now
                self._made_without &= task.absent
            self._give_up(task, "failed", "MoveFailed", reason, now_ms)
            return
        self._task = None
        self._is_carried_over = False
        if task.grown is None:
            self._made_without = task.absent
            self._again_after_ms, self._again_at_ms = REST_AFTER_FAILURE_MS, None
        self.settled += 1
        done = _answered(task, self._made, [move.move for move in moves])
        self._note(
            f"done: {done.started} started, {done.ended} ended, {done.changed} changed, {done.kept} kept,"
            f" {len(done.unplaced)} unplaced"
        )
        if task.peer is not None and task.change is not None:
            self._actuator.send(task.peer, done)

    def _give_up(self, task: _Task, status: str, code: str, reason: str, now_ms: float) -> None:
        """Nothing came of it: what was wanted before is wanted again."""
        self._task = None
        self.settled += 1
        if status == "failed" or task.change is None:
            self._rest(task, now_ms)
        self._note(f"given up: {task.why}: {reason}")
        self._undo(task, now_ms)
        if task.peer is not None and task.change is not None:
            self._actuator.send(task.peer, Changed(task.change.request_no, status, code, reason))

    def _rest(self, task: _Task, now_ms: float) -> None:
        if task.grown is not None:
            self._grown_until_ms[task.grown.gpu] = now_ms + REST_AFTER_FAILURE_MS
            return
        if not self._are_gpus_changed:  # else it was a plan for other GPUs than there are now
            self._rests_until_ms = now_ms + REST_AFTER_FAILURE_MS
        self._again_at_ms = now_ms + self._again_after_ms
        self._again_after_ms = min(AGAIN_MS_MAX, 2 * self._again_after_ms)

    def _undo(self, task: _Task, now_ms: float) -> None:
        """What an operator wanted is wanted no more, nor planned for. Of what was added stays what is hosted all the same."""
        change = task.change
        if self._desired is not task.desired or not isinstance(change, ModelsAdd | ModelSet | DrainAsked):
            return  # nothing was begun, or it is to be so in any case
        stay: set[ModelId] = set()
        if isinstance(change, ModelsAdd):
            hosted = {
                model.model_id for record in self._fleet.slices.values() for model in record.spec.models
            }
            stay = _names_in(change) & hosted
            gone = sorted(_names_in(change) - hosted)
            self._actuator.remove_models(gone, now_ms)
            self._desired = self._desired.without(gone)
        else:
            self._desired = task.before
            if isinstance(change, ModelSet):
                self._actuator.put_slo(change.model_id, task.slo_before_ms, now_ms)
        self._rates.go_back(task.rates_before, stay)
        left = (one for one in self._made.unplaced if one.model_id in stay)
        self._made = replace(self._made, unplaced=(*task.unplaced_before, *left))


def _models_of(unplaced: Iterable[UnplacedInfo]) -> Iterator[ModelId]:
    return (one.model_id for one in unplaced)


def _names_in(change: PlanChange) -> set[ModelId]:
    """The models that a change is about."""
    match change:
        case ModelsAdd(document=document):
            return {ModelId(section["name"]) for section in json.loads(document)}
        case ModelSet(model_id=model_id):
            return {model_id}
        case _:
            return set()


def _answered(task: _Task, made: PlanMade, moves: Sequence[MoveInfo]) -> Changed:
    """What a plan and its moves come to."""
    unplaced = {*_models_of(made.unplaced)}
    named = set() if task.change is None else _names_in(task.change)
    fresh = unplaced.difference(_models_of(task.unplaced_before)) | unplaced & named
    return Changed(
        0 if task.change is None else task.change.request_no,
        "partial" if fresh else "ok",
        started=sum(len(move.starts) for move in moves),
        ended=sum(len(move.ends) for move in moves),
        kept=len(made.kept),
        unplaced=made.unplaced,
        changed=sum(len(move.changes) for move in moves),
    )


def _with_declared(desired: Desired, change: ModelsAdd, made: PlanMade) -> Desired:
    """The rates that added sections declare, as they were read."""
    added = {m: made.rates_rps[m] for m in _names_in(change) if m in made.rates_rps}
    return replace(desired, declared_rps={**desired.declared_rps, **added})


def _described_move(move: RunningMove) -> str:
    changes = ", ".join(
        f"{one.slice_id} hosts {' '.join(model.model_id for model in one.models)}"
        for one in move.move.changes
    )
    if changes and not move.starts and not move.move.ends:
        return changes
    starts = ", ".join(start.spec.slice_id for start in move.starts) or "nothing"
    ends = ", ".join(move.move.ends) or "nothing"
    return f"{starts} for {ends}" + (f", {changes}" if changes else "")


def _described(change: PlanChange) -> str:
    match change:
        case ModelsAdd():
            return "models are added"
        case ModelsRemove(model_ids=model_ids):
            return f"{', '.join(model_ids)} is removed"
        case ModelSet(model_id=model_id):
            return f"{model_id} is set"
        case DrainAsked(node_id=node_id, gpu=gpu, is_back=is_back):
            where = node_id if gpu is None else f"{node_id}/gpu{gpu}"
            return f"{where} is {'taken back' if is_back else 'drained'}"
