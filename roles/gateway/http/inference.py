"""One inference by HTTP, from its body to its answer: by callbacks, without a task of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from fabric.errors import FabricError
from fabric.messages import ModelInfo
from roles.gateway.failures import GONE, Failure, failure_of
from roles.gateway.http.messages import Answer, Cancellable, Reply, Request
from roles.gateway.http.predict import read_predict, write_predict
from roles.gateway.http.protocol_v2 import LENGTH_HEADER, failed, read_infer, write_infer, write_json
from roles.gateway.inference import Inference, Rows, checked_rows, outputs_of
from roles.gateway.service import Answered, Outcome, Service
from roles.gateway.timing import server_timing
from roles.runtime.process import log


class HttpInference:
    """Asked of the frontends, and once more where its model has become another one since the gateway heard of it. Counted when it ends."""

    def __init__(
        self, service: Service, model: str, request: Request, answer: Answer, *, is_plain: bool
    ) -> None:
        self._service = service
        self._model = model
        self._request = request
        self._answer = answer
        self._is_plain = is_plain
        self._asked_at_ms = service.clock.now_ms()
        self._under_way: Cancellable | None = None
        self._is_over = self._was_changed = False

    def start(self) -> None:
        """Ask, or answer at once."""
        self._ask(self._service.model(self._model))

    def cancel(self) -> None:
        """Its client has gone."""
        if not self._is_over:
            under_way = self._under_way
            self._end(GONE)
            if under_way is not None:
                under_way.cancel()

    def _ask(self, info: ModelInfo | None) -> None:
        try:
            inference, rows = self._read(info)
            budget_ms = self._service.budget_left_ms(inference, self._request.began_at_ms)
            ended = partial(self._on_end, info, inference, rows)
            self._under_way = self._service.submit(inference, rows, budget_ms, ended)
        except Exception as error:  # noqa: BLE001  strangers' words must not end everybody's gateway
            # The error itself is not kept: it holds this frame, and this frame the request.
            failure = self._failure_of(error)
        else:
            return
        self._refused(info, failure)

    def _read(self, info: ModelInfo | None) -> tuple[Inference, Rows]:
        head, body = self._request.head, self._request.body
        if self._is_plain:
            return read_predict(self._model, body, head.headers.get("content-type", ""), head.query, info)
        inference = read_infer(self._model, body, head.headers.get(LENGTH_HEADER))
        return inference, checked_rows(info, inference)

    def _on_end(self, info: ModelInfo | None, inference: Inference, rows: Rows, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            self._refused(info, outcome)
            return
        try:
            reply = self._written(inference, rows, outcome)
        except Exception as error:  # noqa: BLE001  what a model gives out must not end everybody's gateway
            self._end(self._failure_of(error))
        else:
            # Asked once only. Its body is not kept while the answer is compressed.
            self._request = replace(self._request, body=b"")
            self._answer(replace(reply, on_written=partial(self._written_out, outcome)))

    def _refused(self, info: ModelInfo | None, failure: Failure) -> None:
        if self._was_changed or not self._service.may_be_outdated(info, failure):
            self._end(failure)
            return
        self._was_changed = True  # it is looked once
        looking = asyncio.ensure_future(self._service.changed(self._model, info, failure))
        self._under_way = looking
        looking.add_done_callback(partial(self._looked, failure))

    def _looked(self, failure: Failure, looking: asyncio.Task[ModelInfo | None]) -> None:
        if self._is_over or looking.cancelled():
            return
        error = looking.exception()
        if error is not None:
            self._end(self._failure_of(error))
        elif (info := looking.result()) is not None:
            self._ask(info)
        else:
            self._end(failure)

    def _written(self, inference: Inference, rows: Rows, answered: Answered) -> Reply:
        headers = [("Server-Timing", server_timing([result.ledger for result in answered.results]))]
        if self._is_plain:
            document = write_predict(inference, answered.results, is_stacked=rows.is_stacked)
            return Reply(200, (write_json(document),), headers=headers)
        answers = [result.outputs for result in answered.results]
        outputs = outputs_of(inference, answers, is_stacked=rows.is_stacked)
        body, content_type, json_size = write_infer(inference, outputs)
        if json_size is not None:
            headers.append(("Inference-Header-Content-Length", str(json_size)))
        return Reply(200, body, content_type, headers)

    def _written_out(self, answered: Answered, failure: Failure | None) -> None:
        """Its outputs are the client's, or there was no room for them."""
        self._count(answered if failure is None else failure)

    def _end(self, failure: Failure) -> None:
        self._count(failure)
        if failure is not GONE:
            self._answer(failed(failure))

    def _count(self, outcome: Outcome) -> None:
        self._is_over = True
        self._under_way = None
        counted = outcome if isinstance(outcome, Failure) else [one.ledger for one in outcome.results]
        self._service.count(self._model, self._asked_at_ms, counted)

    def _failure_of(self, error: BaseException) -> Failure:
        if not isinstance(error, FabricError):
            log.error("inference_failed model=%r", self._model[:200], exc_info=error)
        return failure_of(error)
