"""Several fine-tuned models as one that a slice hosts: each row of a batch runs with its own head (ADR 0290).

They are loaded one after the other, and each lets go of whatever weights the first one has as well, so that never more than
one whole model is there beside what is shared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import PREFIX, HeadOutputs, HeadSpec, TensorInfo
from roles.gpu_worker.executors.base import HEAD_INPUT
from roles.gpu_worker.executors.hosted import check_outputs, sendable, signature
from roles.gpu_worker.executors.loaders.base import LoadedModel, LoaderError, NotAModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.merging import GROUPS, TRACED
from roles.gpu_worker.executors.merging.base import CannotMerge, Group, Infer, Member, Rows
from roles.gpu_worker.executors.merging.equality import share_equal

log = logging.getLogger("tenuto")


def load_heads(
    heads: Sequence[HeadSpec],
    device: torch.device,
    merge: str = PREFIX,
    *,
    is_beside: bool = False,
    is_idempotent: bool = True,
) -> LoadedModel:
    """The heads as one model, run together in that way where they can.

    `is_beside`: other models of this process serve meanwhile. `is_idempotent`: a request may run more than once. Raises LoaderError where one cannot be loaded or does not go with
    the first one.
    """
    loaded: dict[ModelId, LoadedModel] = {}
    for head in heads:
        one = _load(head, device)
        if loaded:
            first_id, first = next(iter(loaded.items()))
            if signature(first.example) != signature(one.example):
                raise NotAModel(f"head {head.model_id} takes other inputs than head {first_id}")
            if (owner := net_of(first)) is not None and (other := net_of(one)) is not None:
                share_equal(owner, other)
        loaded[head.model_id] = one
    with torch.inference_mode():
        outputs = {head_id: outputs_of(one, device) for head_id, one in loaded.items()}
        _check_outputs(outputs)
        joint = JointHeads(loaded, outputs, device, merge, is_beside=is_beside, is_idempotent=is_idempotent)
    return LoadedModel(
        joint,
        joint.example(),
        next(iter(loaded.values())).image,
        head_bounds={head_id: one.bounds for head_id, one in loaded.items()},
        heads=tuple(HeadOutputs(head_id, infos) for head_id, infos in outputs.items()),
        merged=joint.merged,
        not_merged=joint.not_merged,
    )


class JointHeads:
    """A `UserModel` of several: `HEAD_INPUT` says which one each row is for. Outputs are padded to the largest head's."""

    def __init__(
        self,
        loaded: Mapping[ModelId, LoadedModel],
        outputs: Mapping[ModelId, tuple[TensorInfo, ...]],
        device: torch.device,
        merge: str,
        *,
        is_beside: bool,
        is_idempotent: bool,
    ) -> None:
        self._runs = {str(head_id): run_of(one) for head_id, one in loaded.items()}
        self._names = list(self._runs)
        self._example = next(iter(loaded.values())).example
        self._shapes = {
            infos[0].name: tuple(
                max(lengths) for lengths in zip(*(info.shape for info in infos), strict=True)
            )
            for infos in zip(*outputs.values(), strict=True)
        }
        nets = [net_of(one) for one in loaded.values()]
        self.nets = nn.ModuleList(net for net in nets if net is not None)
        self.not_merged = ""
        self.merged: tuple[str, ...] = ()
        self._group: Group | None = None
        try:
            members = {
                name: Member(only(net, name), self._runs[name], _on(device, one.example))
                for name, net, one in zip(self._names, nets, loaded.values(), strict=True)
            }
            self._group = _group(merge, members, is_beside=is_beside, is_idempotent=is_idempotent)
            self.merged = self._group.merged
        except CannotMerge as error:
            self.not_merged = str(error)
        except Exception as error:  # noqa: BLE001  users' code, traced, wrapped and given rows of ours: apart each runs as it is
            told = " ".join(str(error).split())[:200]
            self.not_merged = f"they do not run together ({type(error).__name__}: {told})"

    def load(self, device: str) -> None:
        """Its heads are loaded."""

    def example(self) -> dict[str, Tensor]:
        """One request for the first head."""
        return {**self._example, HEAD_INPUT: torch.zeros((), dtype=torch.int64)}

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each row with its head; the heads run together where they can be merged."""
        numbers = batch[HEAD_INPUT].tolist()
        rows = {key: value for key, value in batch.items() if key != HEAD_INPUT}
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        device = next(iter(rows.values())).device
        where = {self._names[number]: torch.tensor(own, device=device) for number, own in places.items()}
        answers = self._answers(
            {name: {key: value[own] for key, value in rows.items()} for name, own in where.items()}
        )
        stacked: dict[str, Tensor] = {}
        for name, answer in answers.items():
            check_outputs(answer, len(where[name]), f"head {name}")
        for key, shape in self._shapes.items():
            padded = {name: _padded(sendable(answer[key]), shape) for name, answer in answers.items()}
            first = next(iter(padded.values()))
            stacked[key] = first.new_empty((len(numbers), *shape))
            for name, own in where.items():
                stacked[key][own.to(first.device)] = padded[name]  # a head may answer on the host
        return stacked

    def _answers(self, batches: Mapping[str, Rows]) -> Mapping[str, Mapping[str, Tensor]]:
        if self._group is not None:
            try:
                return self._group.run(batches)
            except CannotMerge:  # these very values took another way through the model
                pass
            except (
                Exception
            ):  # users' code with others' rows around; if it is a head's own fault, it fails again
                log.warning("a joint batch failed, its heads run apart", exc_info=True)
        return {name: self._runs[name](batch) for name, batch in batches.items()}


def _load(head: HeadSpec, device: torch.device) -> LoadedModel:
    if head.loader is None:
        raise ConfigError(f"head {head.model_id!r} has no loader, and a {device.type} device needs one")
    try:
        return load_model(head.loader, device)
    except LoaderError as error:
        raise LoaderError(f"head {head.model_id}: {error}") from error


def _group(merge: str, members: Mapping[str, Member], *, is_beside: bool, is_idempotent: bool) -> Group:
    """Raises CannotMerge."""
    if not is_idempotent:
        # Around what is shared, and where a joint run goes wrong, `infer` is called again.
        raise CannotMerge("a joint run may run a request twice, which idempotent: false forbids")
    if is_beside and merge in TRACED:
        # torch changes `nn.Module.__call__` for all threads meanwhile, and TorchScript models fail at that.
        raise CannotMerge(
            "tracing would disturb what this worker serves: they are merged when it starts again"
        )
    return GROUPS[merge](members)


def run_of(loaded: LoadedModel) -> Infer:
    """All that a batch goes through, with what its class does before and after."""
    model = loaded.model
    pre, post = getattr(model, "pre", None), getattr(model, "post", None)

    def run(rows: Rows) -> Mapping[str, Tensor]:
        outputs = model.infer(rows if pre is None else pre(rows))
        return outputs if post is None else post(outputs)

    return run


def net_of(loaded: LoadedModel) -> nn.Module | None:
    """The one module that a model computes with; None: it has several, or none that can be found."""
    found = [value for value in vars(loaded.model).values() if isinstance(value, nn.Module)]
    return found[0] if len(found) == 1 else None


def only(net: nn.Module | None, name: str) -> nn.Module:
    """The module of that model. Raises CannotMerge where there is not one."""
    if net is None:
        raise CannotMerge(f"the object of {name} does not hold exactly one torch module")
    return net


def _on(device: torch.device, example: Mapping[str, Tensor]) -> Rows:
    return {key: value.to(device) for key, value in example.items()}


def _padded(answer: Tensor, shape: Sequence[int]) -> Tensor:
    """With zeros, behind what is there."""
    missing = [most - length for most, length in zip(shape, answer.shape[1:], strict=True)]
    if any(length < 0 for length in missing):
        raise NotAModel(f"a head gives {list(answer.shape[1:])} for one request, more than for its example")
    return functional.pad(answer, [pad for length in reversed(missing) for pad in (0, length)])


def outputs_of(loaded: LoadedModel, device: torch.device) -> tuple[TensorInfo, ...]:
    """What an answer of it has for one request. Raises NotAModel."""
    rows = {
        key: value[None].clone() for key, value in _on(device, loaded.example).items()
    }  # `infer` may write to it
    answer = run_of(loaded)(rows)
    check_outputs(answer, 1, type(loaded.model).__name__)
    return signature({key: sendable(value[0]) for key, value in sorted(answer.items())})


def _check_outputs(outputs: Mapping[ModelId, tuple[TensorInfo, ...]]) -> None:
    """That they can be stacked: the same names and dtypes, as many axes."""
    kinds = {
        head_id: [(info.name, info.dtype, len(info.shape)) for info in infos]
        for head_id, infos in outputs.items()
    }
    (first_id, first), *others = kinds.items()
    for head_id, kind in others:
        if kind != first:
            raise NotAModel(
                f"head {head_id} gives other outputs than head {first_id}: names, dtypes and numbers of axes must be the same"
            )
