"""Load and unload, as Triton's model repository extension has them: an operator's `models add` and `remove`.

The repository is the cluster's file: a model of it that was unloaded can be loaded again by its name. Another one is loaded by the
request's parameter `config`, JSON with a section as in the file's `models`. Off unless `cluster.gateway.model_control` says so, and only where
the scheduler is on the same host: these are an operator's words, and a gateway has no operator's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from fabric.errors import ConfigError, FabricError, InvalidInput, ModelNotFound, Overloaded
from fabric.ids import ModelId
from fabric.messages import Changed, ModelInfo, ModelsAdd, ModelsRemove, PlanChange
from fabric.policy_options import shown
from roles.config.read_config import parse_config
from roles.gateway.failures import Refused, Unsupported
from roles.gateway.http.protocol_v2 import read_json
from roles.gateway.service import Service
from roles.runtime.operator_request import ask_change, new_request_no
from roles.runtime.running_cluster import ActiveScheduler, active_schedulers, having, roomiest
from roles.runtime.shard_reports import combined

READY_LIMIT_MS: Final = 300_000.0
"""For a model that is served already to be ready: its slices are being started, or none of them could be."""

GONE_LIMIT_MS: Final = 1_000.0
"""Of frontends to hear of it."""

_END_S: Final = 1.0
"""Of a thread that was told to end."""

Section = Mapping[str, Any]


class Repository:
    """What may be loaded, and how. `sections`: the file's, by name. `is_open`: whether anything may be changed from here."""

    def __init__(
        self, sections: Mapping[str, Section], run_dir: Path, base_dir: Path, *, is_open: bool
    ) -> None:
        self._sections = sections
        self._run_dir = run_dir
        self._base_dir = base_dir
        self._is_open = is_open
        self._is_busy = False
        self._thread: threading.Thread | None = None  # of the last change
        self._is_over = threading.Event()

    def close(self) -> None:
        """A change that is under way goes on without us: ZeroMQ ends the process where its sockets are closed under a thread that uses them."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    @property
    def names(self) -> Sequence[str]:
        """Of the models that can be loaded by name; none where nothing may be, so that no list of a file that has changed since is shown."""
        return tuple(self._sections) if self._is_open else ()

    async def load(
        self, name: str, served: Mapping[ModelId, ModelInfo], parameters: Mapping[str, object]
    ) -> None:
        """Serve it. Of a model that is `served` already nothing changes. Raises Refused, ModelNotFound, InvalidInput."""
        self._require_open()
        _require_no_head(name, served)
        for key in parameters:
            if key != "config":
                raise Unsupported(f"load does not know the parameter {shown(key)}; there is config")
        section = self._section(name, parameters.get("config"))
        if ModelId(name) not in served:
            await self._carry_out(lambda number: ModelsAdd(number, json.dumps([section])))
        elif parameters.get("config") is not None:
            raise Refused(f"model {shown(name)} is served; unload it before it is loaded with another config")

    async def unload(self, name: str, served: Mapping[ModelId, ModelInfo]) -> None:
        """Serve it no more. Raises Refused, ModelNotFound."""
        self._require_open()
        _require_no_head(name, served)
        model_id = ModelId(name)
        if model_id in served:
            await self._carry_out(lambda number: ModelsRemove(number, (model_id,)), partial(having, model_id))
        elif name not in self._sections:
            raise ModelNotFound(f"no model {shown(name)} is served")

    def _require_open(self) -> None:
        if not self._is_open:
            raise Refused(
                "models are not changed through this gateway: cluster.gateway.model_control is false"
            )

    def _section(self, name: str, config: object) -> Section:
        if config is None:
            section = self._sections.get(name)
            if section is None:
                raise ModelNotFound(
                    f"model {shown(name)} is not in the cluster's file; give the parameter config, a section of models as JSON"
                )
            return section
        section = read_json(config, "config") if isinstance(config, str | bytes) else None
        if not isinstance(section, dict):
            raise InvalidInput("config must be a text: JSON with a section as in the file's models")
        if section.setdefault("name", name) != name:
            raise InvalidInput(f"config is of {shown(section['name'])}, and {shown(name)} is to be loaded")
        try:
            parse_config({"models": [section], "cluster": {"gpus": 1}}, self._base_dir, source="config")
        except FabricError as error:
            raise InvalidInput(str(error)) from error
        return section

    async def _carry_out(
        self,
        change: Callable[[int], PlanChange],
        shards: Callable[[Mapping[int, ActiveScheduler]], Sequence[int]] | None = None,
    ) -> None:
        if self._is_busy:
            raise Overloaded("another model is being loaded or unloaded")
        asking, self._thread = _aside(partial(self._ask, change(new_request_no()), shards))
        self._is_busy = True
        asking.add_done_callback(self._asked)
        # Who asked may go away; the change goes on.
        changed = await asyncio.shield(asking)
        if changed.status == "partial":
            reasons = "; ".join(one.reason for one in changed.unplaced)
            raise Refused(f"no place was found for it: {reasons:.500}")
        if changed.code == "Busy":
            raise Overloaded(changed.reason)
        if changed.status != "ok":
            raise Refused(f"{changed.code or changed.status}: {changed.reason}")

    def _asked(self, done: asyncio.Future[Changed]) -> None:
        self._is_busy = False
        if not done.cancelled():
            done.exception()  # looked at, also where nobody waits for it any more

    def _ask(
        self, change: PlanChange, shards: Callable[[Mapping[int, ActiveScheduler]], Sequence[int]] | None
    ) -> Changed:
        """`shards`: whose schedulers are asked; None: the shard with most room."""
        try:
            schedulers = active_schedulers(self._run_dir)
            own = [roomiest(schedulers)] if shards is None else shards(schedulers)
            is_over = self._is_over.is_set
            return combined(
                [(one, ask_change(schedulers[one].addresses, change, is_given_up=is_over)) for one in own]
            )
        except ConfigError as error:
            raise Refused(str(error)) from error


async def load(service: Service, repository: Repository, name: str, parameters: Mapping[str, object]) -> None:
    """Load it, and wait until it is ready and known here. Raises as `Repository.load` does, and NoReplica, PeerLost."""
    await repository.load(name, await service.served(service.clock.now_ms()), parameters)
    await service.until_ready(name, READY_LIMIT_MS)


async def unload(service: Service, repository: Repository, name: str) -> None:
    """Unload it, and wait until it is known here no more. Raises as `Repository.unload` does, and PeerLost."""
    await repository.unload(name, await service.served(service.clock.now_ms()))
    await service.until_gone(name, GONE_LIMIT_MS)


def _require_no_head(name: str, served: Mapping[ModelId, ModelInfo]) -> None:
    info = served.get(ModelId(name))
    if info is not None and info.head_of not in ("", name):
        whole = shown(info.head_of)
        raise Refused(
            f"{shown(name)} is a head of model {whole}: load and unload {whole}, with all of its heads"
        )


def _aside(work: Callable[[], Changed]) -> tuple[asyncio.Future[Changed], threading.Thread]:
    """On a thread that nobody waits for: the gateway's end does not take as long as a model takes to load."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Changed] = loop.create_future()

    def settle(changed: Changed | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            assert changed is not None, "it has one or the other"
            future.set_result(changed)

    def run() -> None:
        changed, failed = None, None
        try:
            changed = work()
        except BaseException as error:  # noqa: BLE001  raised again where it was asked for: a change without an end keeps all others out
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the gateway has ended
            loop.call_soon_threadsafe(settle, changed, failed)

    thread = threading.Thread(target=run, name="model-change", daemon=True)
    thread.start()
    return future, thread
