"""The bounded thread pool in which a frontend decodes pictures, as a source of its driver."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from fabric.errors import Internal, Overloaded, RequestError
from fabric.link import NamedTensor
from fabric.messages import ImagePreprocess
from roles.frontend.events import Preprocessed, PreprocessFailed
from roles.frontend.preprocess import check_signature, preprocess
from roles.runtime.core import Handle
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.sources import SourceOver
from roles.runtime.payloads import Payloads

Job = Future[Sequence[NamedTensor]]

JOBS_MAX = 256  # two threads at about 5 ms a picture: more than half a second of work serves no SLO


class Decoding(SourceOver):
    """Jobs by payload handle. A job whose payload is forgotten ends without an event.

    Pillow gives up the interpreter's lock while it decodes and resizes, so threads are enough.
    """

    def __init__(self, payloads: Payloads, threads: int = 2, jobs_max: int = JOBS_MAX) -> None:
        self._ended: Mailbox[tuple[Handle, Job | RequestError]] = Mailbox()  # an error: it never became a job
        super().__init__(self._ended)
        self._payloads = payloads
        self._jobs_max = jobs_max
        self._jobs = 0  # in the pool, wanted or not
        self._wanted: set[Handle] = set()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def start(self, payload: Handle, image: ImagePreprocess) -> None:
        """Decode on other threads than the loop's; with `jobs_max` jobs already there it fails, as an event too.

        So does what is no picture by its first bytes: its budget is not spent on waiting for a thread.
        """
        tensors = self._payloads.get(payload)
        try:
            self._check(tensors, image)
        except RequestError as error:
            self._ended.post((payload, error))
            return
        self._jobs += 1
        self._wanted.add(payload)
        try:
            job = self._threads.submit(self._decode_if_wanted, payload, tensors, image)
        except RuntimeError as error:  # the host has no more threads for us
            self._jobs -= 1
            self._wanted.discard(payload)  # it is in the pool all the same
            self._ended.post((payload, Overloaded(f"its picture cannot be decoded now: {error}")))
            return
        job.add_done_callback(lambda done: self._ended.post((payload, done)))

    def forget(self, payload: Handle) -> None:
        """Nobody waits for this one; nothing if it is no job."""
        self._wanted.discard(payload)

    def take(self, limit: int, now_ms: float) -> Sequence[Preprocessed | PreprocessFailed]:
        """What has become of at most `limit` jobs; the decoded tensors are behind their handles by then."""
        events: list[Preprocessed | PreprocessFailed] = []
        for payload, job in self._ended.take(limit, now_ms):
            if isinstance(job, RequestError):
                events.append(PreprocessFailed(payload, job.code, job.reason))
                continue
            self._jobs -= 1
            if payload in self._wanted:
                self._wanted.discard(payload)
                events.append(self._settle(payload, job))
        return events

    def close(self) -> None:
        """Wait for the jobs that run (each is bounded by the pixels it may have); the others never start."""
        self._wanted.clear()
        self._threads.shutdown(wait=True)
        self._ended.close()

    def _check(self, tensors: Sequence[NamedTensor], image: ImagePreprocess) -> None:
        for tensor in tensors:
            if tensor.name == image.input_name:
                check_signature(tensor.array)
        if self._jobs >= self._jobs_max:
            raise Overloaded(f"{self._jobs_max} pictures are being decoded here")

    def _decode_if_wanted(
        self, payload: Handle, tensors: Sequence[NamedTensor], image: ImagePreprocess
    ) -> Sequence[NamedTensor]:
        return _decode(tensors, image) if payload in self._wanted else ()

    def _settle(self, payload: Handle, job: Job) -> Preprocessed | PreprocessFailed:
        error = job.exception()
        if error is None:
            self._payloads.replace(payload, job.result())
            return Preprocessed(payload)
        if isinstance(error, RequestError):
            return PreprocessFailed(payload, error.code, error.reason)
        return PreprocessFailed(payload, Internal.code, f"decoding the picture failed: {error!r}")


def _decode(tensors: Sequence[NamedTensor], image: ImagePreprocess) -> Sequence[NamedTensor]:
    # A tensor of its own: what came may lie in shared memory, and the place there is the file's.
    return [
        NamedTensor(tensor.name, preprocess(tensor.array.astype(np.uint8, copy=False), image))
        if tensor.name == image.input_name
        else tensor
        for tensor in tensors
    ]
