"""Users' models, good and bad."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor


class Doubler:
    """Twice its input; a NaN in it raises, minus one asks for more memory than there is."""

    def load(self, device: str) -> None:
        self.device = device

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        if torch.isnan(x).any():
            raise ValueError("not a number")
        if (x == -1).any():
            torch.empty(1 << 50, dtype=torch.uint8)
        if (x == -2).any():
            sys.exit("the model wants to leave")
        return {"twice": x * 2, "total": x.sum(dim=1)}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(3)}


class IsAModule(torch.nn.Module):
    """A module itself, with random weights."""

    def load(self, device: str) -> None:
        self.linear = torch.nn.Linear(3, 1, device=device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.linear(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(3)}


class WithoutWeights(torch.nn.ReLU):
    """A module that has none."""

    def load(self, device: str) -> None:
        self.device = device

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(3)}


class ManyInputs(Doubler):
    """More than a message could hold for a batch of 32."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"total": sum(batch.values(), torch.zeros(1))}

    def example(self) -> dict[str, Tensor]:
        return {f"x{number}": torch.zeros(1) for number in range(130)}


class Echo(Doubler):
    """Answers with a view of its own input."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"x": batch["x"], "half": batch["x"].to(torch.bfloat16)}


class KeepsItsOutputs(Doubler):
    """Answers out of memory that it writes again for each batch: a buffer of its own, and what numpy has of its input."""

    def load(self, device: str) -> None:
        self.buffer = torch.zeros(64, 3)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        twice = torch.mul(x, 2, out=self.buffer[: len(x)])
        return {"twice": twice, "tail": torch.from_numpy(x.numpy()[:, 1:])}


class Untold(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("nobody knows")


class RaisesAnything(Doubler):
    """What its input's number says; 9: outputs without a name."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        match int(batch["x"][0, 0]):
            case 1:
                raise asyncio.CancelledError
            case 2:
                raise KeyboardInterrupt
            case 3:
                raise GeneratorExit
            case 4:
                raise Untold
            case 9:
                return {9: batch["x"]}  # type: ignore[dict-item]
        return super().infer(batch)


class RaisesNoExceptionInLoad(Doubler):
    def load(self, device: str) -> None:
        raise asyncio.CancelledError


class RaisesNoTextInLoad(Doubler):
    def load(self, device: str) -> None:
        raise Untold


class Slow(Doubler):
    def load(self, device: str) -> None:
        time.sleep(0.3)


class RaisesInLoad(Doubler):
    def load(self, device: str) -> None:
        raise RuntimeError("no weights today")


class WrongBatch(Doubler):
    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"twice": batch["x"][:1].repeat(7, 1)}


class NotADict(Doubler):
    def infer(self, batch: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        return batch["x"]


class NotATensor(Doubler):
    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, list[float]]:  # type: ignore[override]
        return {"x": [1.0]}


class EmptyExample(Doubler):
    def example(self) -> dict[str, Tensor]:
        return {}


class NumpyExample(Doubler):
    def example(self) -> dict[str, Tensor]:
        return {"x": [0.0]}  # type: ignore[dict-item]


class NoExample:
    def load(self, device: str) -> None: ...

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(batch)


not_a_class = 5


class PrePost(Doubler):
    """Adds one before, and answers with what it saw after."""

    def pre(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"x": batch["x"] + 1}

    def post(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"total": outputs["total"].round()}


class PreIsNoMethod(Doubler):
    pre = 5


class NotFinite(Doubler):
    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"nan": batch["x"] / 0, "sum": batch["x"].sum(dim=1)}


class Hungry(Doubler):
    """Has no memory for more than two rows whose sum is over 0."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if len(batch["x"]) > 2 and batch["x"].sum() > 0:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().infer(batch)


class HangsOnMinusThree(Doubler):
    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if (batch["x"] == -3).any():
            time.sleep(1_000)
        return super().infer(batch)


class KeepsTheLock(Doubler):
    """For a minus four, the interpreter's lock for a quarter of an hour: the loop beside it stands as well."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if (batch["x"] == -4).any():
            ctypes.PyDLL(None).sleep(900)
        return super().infer(batch)


class HangsInLoad(Doubler):
    def load(self, device: str) -> None:
        time.sleep(3_600)


class DiesInLoad(Doubler):
    """As a segmentation fault would: nobody gets to say anything."""

    def load(self, device: str) -> None:
        os._exit(7)


class Deep(Doubler):
    """Its output has more axes than the wire has."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"deep": batch["x"].reshape(-1, 3, *[1] * 7)}


class Vast(Doubler):
    """Its output is larger than what one answer may bring."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"vast": torch.empty((len(batch["x"]), 257 << 20), dtype=torch.uint8)}


class Broad(Doubler):
    """It has 130 inputs."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": torch.stack(list(batch.values())).sum(dim=0)}

    def example(self) -> dict[str, Tensor]:
        return {f"x{number}": torch.zeros(1) for number in range(130)}


class Fickle(Doubler):
    """Modest when it is warmed; what it answers later cannot be sent: nine axes for 9, 257 MB for 257."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        if (x == 9).any():
            return {"x": x.reshape(-1, 3, *[1] * 7)}
        if (x == 257).any():
            return {"x": torch.empty((len(x), 257 << 20), dtype=torch.uint8)}
        return {"x": x * 2}


may_load = threading.Event()


class LoadsWhenTold(Doubler):
    """Its load waits until `may_load` is set."""

    def load(self, device: str) -> None:
        """Wait."""
        assert may_load.wait(60)


class OutOfSteps(Doubler):
    """Raises on the device's thread alone: warming it up fails, loading it did not."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the thread that loads."""
        if threading.current_thread().name == "device":
            raise ValueError("not here")
        return super().infer(batch)


class LooksAtItsResult(Doubler):
    """Cannot be captured as a graph."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Another answer for large numbers."""
        total = batch["x"].sum(dim=1)
        return {"total": total if total.max().item() < 1e6 else total * 2}


class NotesItsRuns(Doubler):
    """Says in `order` that it runs."""

    order: ClassVar[list[str]] = []

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One more."""
        self.order.append("batch")
        return super().infer(batch)


class AsksForAnother(Doubler):
    """In each of its runs on the device's thread it asks for a batch of another model, unless one is still awaited."""

    ask: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One more, noted in the same `order`."""
        order = NotesItsRuns.order
        if threading.current_thread().name == "device":
            order.append("run")
            if order.count("asked") == order.count("batch"):
                order.append("asked")
                AsksForAnother.ask()
        return super().infer(batch)


class Weighty(Doubler):
    """Has one parameter, to which `made` refers weakly."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []

    def load(self, device: str) -> None:
        """Make it."""
        self.module = torch.nn.Linear(3, 3, bias=False)
        Weighty.made[:] = [weakref.ref(self.module.weight)]


class WeightyInACircle(Weighty):
    """The same, held by itself."""

    def load(self, device: str) -> None:
        """Make it, with a circle that only the collector undoes."""
        super().load(device)
        self.itself = self


class WeightyWhenTold(WeightyInACircle):
    """The same; its load waits until `may_load` is set."""

    def load(self, device: str) -> None:
        """Make it, and wait."""
        super().load(device)
        assert may_load.wait(60)


class TwoViews(Doubler):
    """Looks at each input twice; the mean of both is its answer."""

    def pre(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Two rows for each request."""
        return {"x": batch["x"].repeat_interleave(2, dim=0)}

    def post(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One again."""
        return {key: value.view(-1, 2, *value.shape[1:]).mean(dim=1) for key, value in outputs.items()}


class TwoViewsOnly(TwoViews):
    """Forgets the mean."""

    def post(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As they are."""
        return dict(outputs)


class OneOfAll(Doubler):
    """Answers one row for all."""

    def post(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first one."""
        return {key: value[:1] for key, value in outputs.items()}


class LeavesOut(Doubler):
    """Drops rows that hold a NaN, and with them their requests."""

    def pre(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The others."""
        return {"x": batch["x"][~batch["x"].isnan().any(dim=1)]}


class _Holder:
    pass


class WeightyInside(Weighty):
    """Holds its module in a container, and the module holds that: the collector undoes it, though the object itself goes at once."""

    def load(self, device: str) -> None:
        """Make it."""
        super().load(device)
        self.held: object = self.hold(self.__dict__.pop("module"))

    def hold(self, module: torch.nn.Module) -> object:
        """A list with it."""
        return module.__dict__.setdefault("owner", [module])


class WeightyInAMapping(WeightyInside):
    """The same in a dict."""

    def hold(self, module: torch.nn.Module) -> object:
        """A dict with it."""
        return module.__dict__.setdefault("owner", {"module": module})


class WeightyInAnObject(WeightyInside):
    """The same in an object, as a pipeline of models is one."""

    def hold(self, module: torch.nn.Module) -> object:
        """An object with it."""
        holder = _Holder()
        holder.module = module  # type: ignore[attr-defined]
        return module.__dict__.setdefault("owner", holder)


class WeightyInAClosure(WeightyInside):
    """The same in a function, where nobody looks for it."""

    def hold(self, module: torch.nn.Module) -> object:
        """A function with it."""
        return module.__dict__.setdefault("owner", lambda: module)


class WeightyAndWrong(WeightyInACircle):
    """Has weights in a circle, and cannot be served."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A row too many."""
        return {"twice": torch.zeros(len(batch["x"]) + 1, 3)}


class FailsAboveFour(Doubler):
    """Raises what `error` says for batches of more than four."""

    error: ClassVar[Callable[[], object]] = staticmethod(lambda: None)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As it says."""
        if len(batch["x"]) > 4:
            FailsAboveFour.error()
        return super().infer(batch)


class FourRowsAtMost(Doubler):
    """Cannot take more."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Says so."""
        if len(batch["x"]) > 4:
            raise ValueError("four rows at most")
        return super().infer(batch)


class OutOfHostMemoryAboveFour(Doubler):
    """Has no memory for more."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Asks for it."""
        if len(batch["x"]) > 4:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().infer(batch)


class Bfloat16Example(Doubler):
    """Its input has a dtype that cannot be sent."""

    def example(self) -> dict[str, Tensor]:
        """In bfloat16."""
        return {"x": torch.zeros(3, dtype=torch.bfloat16)}


class ExampleWithGradient(Doubler):
    """Its example is a parameter's value."""

    def example(self) -> dict[str, Tensor]:
        """It wants a gradient."""
        return {"x": torch.zeros(3, requires_grad=True)}


class HalfAnswers(Doubler):
    """Answers in bfloat16, which is sent as float32."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One number in two bytes."""
        return {"half": batch["x"].sum(dim=1).to(torch.bfloat16)}
