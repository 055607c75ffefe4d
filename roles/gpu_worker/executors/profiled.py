"""A loaded model as the profiler runs it: batches of one size, in and out through pinned memory."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fabric.clock import Clock
from fabric.errors import ConfigError, error_text
from fabric.messages import PREFIX, HeadSpec, LoaderSpec
from profiles.estimator.graph import OperatorGraph
from profiles.profilers.operator_graph import fake_tensors, operator_graph
from roles.gpu_worker.executors.base import HEAD_INPUT
from roles.gpu_worker.executors.cut import CutError, Traced, add_tensor
from roles.gpu_worker.executors.hosted import check_outputs, sendable
from roles.gpu_worker.executors.loaders.base import LoadedModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.merging.heads import load_heads, run_of

Run = Callable[[], Mapping[str, Tensor]]


class ProfiledModel:
    """Runs on the current stream, eagerly: graphs would hide the launches that iGniter's model is about."""

    def __init__(
        self, spec: LoaderSpec, device: torch.device, heads: Sequence[HeadSpec] = (), merge: str = PREFIX
    ) -> None:
        """With `heads` it is these that are loaded, and batches have their requests spread over them."""
        self._loaded: LoadedModel = load_heads(heads, device, merge) if heads else load_model(spec, device)
        self._device = device
        self._is_cuda = device.type == "cuda"

    @property
    def load_bytes(self) -> int:
        """Of one request."""
        return sum(
            value.numel() * value.element_size()
            for key, value in self._loaded.example.items()
            if key != HEAD_INPUT
        )

    @property
    def not_merged(self) -> str:
        """Why its heads run one after the other; empty: they do not."""
        return self._loaded.not_merged

    def feedback_bytes(self) -> int:
        """Of one request's outputs."""
        with torch.inference_mode():
            outputs = self.batch(1)()
        return sum(value.numel() * value.element_size() for value in outputs.values())

    @property
    def digest(self) -> str:
        """SHA-256 over the weights by name, or over the class's source where there are none.

        Buffers are left out: the statistics of random weights are measured on the device, each with its own rounding.
        """
        found = hashlib.sha256()
        model = self._loaded.model
        held = {"self": model} if isinstance(model, nn.Module) else vars(model)
        modules = [value for _, value in sorted(held.items()) if isinstance(value, nn.Module)]
        weights = [weight for module in modules for weight in sorted(module.named_parameters())]
        if not weights:
            found.update(inspect.getsource(type(model)).encode())
        for name, value in weights:
            add_tensor(found, name, value)
        return found.hexdigest()

    def stages_ms(self, counts: Sequence[int], clock: Clock) -> Iterator[tuple[int, list[float] | str]]:
        """For each number of stages into which it is cut, what they take for one request in ms; or why it cannot be cut so."""
        example = {key: value.to(self._device) for key, value in self._loaded.example.items()}
        traced: Traced | None = None
        for count in counts:
            try:
                traced = traced or Traced(self._loaded.model, example)
                yield count, traced.times_ms(traced.cut(traced.balanced(count, clock)), clock)
            except CutError as error:
                yield count, str(error)
            except Exception as error:  # noqa: BLE001  users' code may raise anything: what was measured whole holds
                yield count, error_text(error)

    def graph(self, batch_size: int) -> OperatorGraph:
        """The operators of one batch, by shapes alone. Raises ProfileError for a model that looks at values."""
        with fake_tensors():
            return operator_graph(self._inferred, self._loaded.example, batch_size)

    def batch(self, batch_size: int) -> Run:
        """One batch of examples: copy in, infer, copy out; on CUDA only put on the current stream."""
        host = {
            key: self._pinned(torch.stack([value.cpu()] * batch_size))
            for key, value in self._loaded.example.items()
        }
        if HEAD_INPUT in host:
            host[HEAD_INPUT] = torch.arange(batch_size) % len(self._loaded.heads)
        there = {key: torch.empty_like(value, device=self._device) for key, value in host.items()}

        def run() -> Mapping[str, Tensor]:
            for key, value in host.items():
                there[key].copy_(value, non_blocking=True)
            return {key: self._fetched(value) for key, value in self._inferred(there).items()}

        return run

    def _inferred(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """As a worker does, with its check."""
        outputs = run_of(self._loaded)(batch)
        check_outputs(outputs, len(next(iter(batch.values()))), type(self._loaded.model).__name__)
        return outputs

    def _pinned(self, value: Tensor) -> Tensor:
        return value.pin_memory() if self._is_cuda else value

    def _fetched(self, value: Tensor) -> Tensor:
        """As a worker copies it."""
        value = sendable(value)
        if not self._is_cuda:
            return value
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def device_named(name: str, threads: int = 1) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:1``. Raises ConfigError where there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"there is no device {name!r}; there is: cpu, cuda, cuda:0, …") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r}; there is: cpu, cuda, cuda:0, …")
    torch.set_num_threads(threads)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name} is wanted, but torch finds no CUDA here")
    found = torch.device("cuda", device.index or 0)
    if found.index >= torch.cuda.device_count():
        raise ConfigError(f"device {name} is wanted, but there are {torch.cuda.device_count()} of them")
    torch.cuda.set_device(found)
    return found
