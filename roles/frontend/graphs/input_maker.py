"""Carries out `MakeInputs` in a frontend: plain edges at once, those with glue in the application's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fabric.clock import Clock
from fabric.errors import RequestError
from fabric.ids import ModelId
from fabric.link import NamedTensor
from roles.applications.served import ServedApplication
from roles.frontend.events import InputsMade, InputsNotMade, MadeInputs, MakeInputs
from roles.frontend.graphs.edges import plain_inputs
from roles.frontend.graphs.glue import GlueRunner, Made
from roles.frontend.tensor_lists import described
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.sources import SourceOver
from roles.runtime.payloads import Payloads


class InputMaker(SourceOver):
    """A source of the driver: each job has one event, `InputsMade` or `InputsNotMade`."""

    def __init__(
        self,
        payloads: Payloads,
        applications: Sequence[ServedApplication],
        clock: Clock,
        bytes_max: int,
    ) -> None:
        self._ended: Mailbox[tuple[int, Made | RequestError]] = Mailbox()
        super().__init__(self._ended)
        self._payloads = payloads
        self._glue: Mapping[ModelId, GlueRunner] = {
            ModelId(one.plan.name): GlueRunner(one.plan.name, one.glue, self._ended.post, clock, bytes_max)
            for one in applications
            if one.glue
        }
        self._with_glue = {(ModelId(one.plan.name), stage) for one in applications for stage in one.glue}

    def start(self, make: MakeInputs) -> None:
        """Begin one; what it needs is taken from the payloads now."""
        answers = [
            (stage, [self._payloads.get(handle) for handle in handles]) for stage, handles in make.after
        ]
        request = self._payloads.get(make.request)
        if (make.application, make.stage) in self._with_glue:
            is_wanted = partial(self._payloads.__contains__, make.request)  # until it has its answer
            self._glue[make.application].start(
                make.job, make.stage, answers, request, make.until_ms, is_wanted
            )
            return
        try:
            made: Made | RequestError = plain_inputs(answers, request, make.names, make.count, make.source)
        except RequestError as error:
            made = error
        self._ended.post((make.job, made))

    def take(self, limit: int, now_ms: float) -> Sequence[InputsMade | InputsNotMade]:
        """What has become of at most `limit` jobs; the inputs are behind their handles by then."""
        events: list[InputsMade | InputsNotMade] = []
        for job, made in self._ended.take(limit, now_ms):
            if isinstance(made, RequestError):
                events.append(InputsNotMade(job, made.code, made.reason))
            else:
                events.append(InputsMade(job, [self._kept(tensors) for tensors in made]))
        return events

    def close(self) -> None:
        """End the processes."""
        for runner in self._glue.values():
            runner.close()
        self._ended.close()

    def _kept(self, tensors: Sequence[NamedTensor]) -> MadeInputs:
        handle = self._payloads.put(tensors)
        assert handle is not None, "the core bounds it"
        return MadeInputs(handle, *described(tensors))
