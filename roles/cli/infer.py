"""`tenuto infer MODEL INPUT`: one request from the shell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from fabric.addresses import check_address
from fabric.client import Client, ClientOptions, InferResult
from fabric.errors import ConfigError, InvalidInput, PeerLost
from fabric.link import Tensor
from fabric.policy_options import shown
from roles.benchmark.targets import one_of_each
from roles.cli.array_files import read_arrays
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import BUDGET_MS, ConnectAddress, key_option, via_host, via_option
from roles.runtime.environment import run_dir
from roles.runtime.running_cluster import frontends_of, processes_in

if TYPE_CHECKING:
    from fabric.messages import Ledger, ModelInfo, StageLine

ROWS_SHOWN = 8


def _check_target(address: str) -> None:
    """Raises ConfigError for what is no frontend's address."""
    if address.startswith(("http://", "https://", "grpc://")):
        raise ConfigError(
            f"{shown(address)} is a gateway's, and infer speaks the SDK's protocol with frontends: give tcp://HOST:PORT, or"
            " ipc:///PATH on this host; by HTTP ask with curl (docs/guides/gateway.md), or send load with"
            " tenuto bench FILE --target http://HOST:PORT"
        )
    check_address(address)


@click.command()
@click.argument("model")
@click.argument("input_path", metavar="INPUT", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--target",
    type=ConnectAddress(check=_check_target),
    help="A frontend's address (default: the cluster of this host).",
)
@via_option
@key_option
@click.option("--budget-ms", type=BUDGET_MS, help="Instead of the model's SLO.")
@click.option("--json", "is_json", is_flag=True, help="Outputs and ledger as JSON on stdout.")
def infer(
    *,
    model: str,
    input_path: Path,
    target: str | None,
    key_file: Path | None,
    budget_ms: float | None,
    is_json: bool,
) -> None:
    """Send one request to MODEL, or to the application of that name, and print the answer and where its time went.

    INPUT is a picture (decoded and resized by the frontend), an .npy array, or an .npz with one array per
    input name.
    """
    addresses = [target] if target else running_frontends()
    options = ClientOptions(key_file=key_file)
    result = asyncio.run(_infer(addresses, options, model, input_path, budget_ms))
    if is_json:
        echo_result(result)
    else:
        print_result(result)


def echo_result(result: InferResult) -> None:
    """Outputs as nested lists, and the ledger, as JSON; of an application also the ledger's line of each stage."""
    outputs = {name: array.tolist() for name, array in result.outputs.items()}
    answer: dict[str, object] = {"outputs": outputs, "ledger": ledger_of(result.ledger)}
    if result.stages:
        answer["stages"] = {
            line.stage: {
                "requests": line.requests,
                "lost": line.lost,
                "is_on_path": line.is_on_path,
                "reason": line.reason,
                "ledger": ledger_of(line.ledger),
            }
            for line in result.stages
        }
    echo_json(answer)


def print_result(result: InferResult) -> None:
    """Outputs and the ledger for people."""
    console = plain_console()
    for name, array in result.outputs.items():
        words = f" {array.dtype} {list(array.shape)}: {_shortened(array)}"
        console.print(Text.assemble((name, "bold"), words))
    console.print(ledger_table(result))
    if result.stages:
        console.print(stages_table(result.stages))


def running_frontends() -> Sequence[str]:
    """The local socket of each frontend of this host, whoever started it; PeerLost when none runs."""
    home = run_dir()
    try:
        addresses = [
            address
            for process in frontends_of(processes_in(home.path))
            for address in one_of_each(process.addresses["client"])
        ]
    finally:
        home.remove()
    if not addresses:
        host = via_host()
        if host:
            raise PeerLost(f"no frontend runs on {host}: say another host, or --key")
        raise PeerLost(
            f"no frontend runs here (looked in {home.path}): start a cluster with 'tenuto up', or give --target"
        )
    return addresses


def ledger_of(ledger: Ledger) -> dict[str, float | str | int]:
    """The ledger with its field names."""
    return {name: getattr(ledger, name) for name in ledger.__struct_fields__}


def stages_table(lines: Sequence[StageLine]) -> Table:
    """One line a stage, for people; those on the path that took longest bear a star."""
    table = Table("stage", "requests", "lost", "preprocess", "held", "waited", "device", "return", "total ms")
    for line in lines:
        own = line.ledger
        numbers = (
            own.preprocess_ms,
            own.held_ms,
            own.waited_ms,
            own.transfer_ms + own.queue_ms + own.gpu_ms,
            own.return_ms,
            own.total_ms,
        )
        star = "*" if line.is_on_path else ""
        table.add_row(
            f"{line.stage}{star}", str(line.requests), str(line.lost), *(f"{spent:.2f}" for spent in numbers)
        )
    lacks = [f"{line.stage}: {line.reason}" for line in lines if line.reason]
    table.caption = Text("\n".join(["*: on the way that took longest; these sum to the whole", *lacks]))
    return table


def ledger_table(result: InferResult) -> Table:
    """One request's ledger for people."""
    table = Table("where the time went", "ms", title=None)
    ledger = result.ledger
    for label, spent_ms in (
        ("network (client to frontend and back)", ledger.network_ms),
        ("preprocess", ledger.preprocess_ms),
        ("held (chosen, to fill the batch)", ledger.held_ms),
        ("waited (forced: no slice free, or a lost try)", ledger.waited_ms),
        ("transfer to the device", ledger.transfer_ms),
        ("queue on the device", ledger.queue_ms),
        ("device", ledger.gpu_ms),
        ("return", ledger.return_ms),
        ("total", ledger.total_ms),
    ):
        table.add_row(label, f"{spent_ms:.2f}")
    table.caption = (
        f"batch of {ledger.batch_size} on {ledger.slice_id}, sent because: {ledger.reason}"
        if ledger.batch_size
        else ledger.reason
    )
    return table


async def _infer(
    addresses: Sequence[str], options: ClientOptions, model: str, path: Path, budget_ms: float | None
) -> InferResult:
    async with Client(addresses, options) as client:
        infos = {info.model_id: info for info in await client.models()}
        info = next((info for model_id, info in infos.items() if model_id == model), None)
        # A model nobody knows is refused by the frontend, with its suggestion.
        return await client.infer(model, read_inputs(path, info), budget_ms=budget_ms)


def read_inputs(path: Path, info: ModelInfo | None) -> Mapping[str, Tensor | bytes]:
    """The tensors in a file; ConfigError when it cannot be read, InvalidInput when it does not fit the model."""
    if path.suffix in (".npy", ".npz"):
        arrays = read_arrays(path)
        return {_only_input(info): arrays} if isinstance(arrays, np.ndarray) else arrays
    try:
        data = path.read_bytes()
    except (OSError, MemoryError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if info is not None and info.image is None:
        raise InvalidInput(f"{info.model_id} takes no pictures: give an .npy or .npz file")
    return {info.image.input_name if info is not None and info.image else "input": data}


def _only_input(info: ModelInfo | None) -> str:
    if info is None or not info.inputs:
        return "input"
    if len(info.inputs) > 1:
        names = ", ".join(tensor.name for tensor in info.inputs)
        raise InvalidInput(
            f"{info.model_id} has several inputs ({names}): give an .npz with an array for each"
        )
    return info.inputs[0].name


def _shortened(array: Tensor) -> str:
    return np.array2string(array, threshold=ROWS_SHOWN, edgeitems=ROWS_SHOWN // 2, precision=4)
