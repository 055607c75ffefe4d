"""`tenuto keys`: make, list, rotate and revoke the keys of a cluster. `docs/operate/security.md` says what each may do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from fabric.curve import new_pair
from fabric.errors import ConfigError
from fabric.keys import (
    CLIENT,
    FRONTEND,
    OPERATOR,
    SCHEDULER,
    TRUSTED_FILE,
    KeyPair,
    Trusted,
    TrustedKey,
    changing,
    checked_principal,
    key_file,
    kind_of,
    naming_path,
    principal_of_node,
    read_trusted,
    write_private,
)
from roles.cli.json_output import echo_json
from roles.cli.options import OutputPath, json_option
from roles.cli.whole_help import WholeHelpGroup
from roles.config.read_config import load_config

_FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
_PRINCIPAL = click.argument("principal")
_LOST_WITHOUT: Mapping[str, str] = {
    SCHEDULER: "nothing is scheduled any more",
    FRONTEND: "no client is served any more",
    OPERATOR: "nobody can operate the cluster from another host any more",
}
"""By principal that a cluster has once: what revoking its last key means."""
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would be done.")


@click.group(cls=WholeHelpGroup)
def keys() -> None:
    """Make, list, rotate and revoke the keys of a cluster."""


@keys.command()
@_FOLDER
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Also a key for each node of this cluster.",
)
@_DRY_RUN
@json_option
def create(folder: Path, config: Path | None, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001  click's flags
    """Make FOLDER with keys of the scheduler, the frontends, the operator and the nodes."""
    if (folder / TRUSTED_FILE).exists():
        raise ConfigError(f"{folder} has keys already: add, rotate or revoke them")
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a folder that is not")
    nodes = [] if config is None else [principal_of_node(node.host) for node in load_config(config).nodes]
    principals = [SCHEDULER, FRONTEND, OPERATOR, *nodes]
    if not dry_run:
        with naming_path(folder):
            folder.mkdir(mode=0o700, parents=True)
        _write(folder, Trusted())
        for principal in principals:
            _add(folder, principal, folder / key_file(principal))
    if as_json:
        _tell(dry_run, {"folder": str(folder), "principals": principals})
        return
    click.echo(f"{'would make' if dry_run else 'made'} {folder}: {', '.join(principals)}")


@keys.command()
@_FOLDER
@_PRINCIPAL
@click.option("--out", type=OutputPath(), help="A client's one file; default: NAME.key here.")
@_DRY_RUN
@json_option
def add(folder: Path, principal: str, out: Path | None, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001  click's flags
    """Make a key for PRINCIPAL: scheduler, frontend, operator, node/NAME, or client/NAME, which gets one file for its own machine."""
    target = _target(folder, principal, out)
    with changing(folder):
        if _trusted(folder).of(principal):
            raise ConfigError(f"{principal} has a key already: rotate or revoke it")
        if not dry_run:
            _add(folder, principal, target)
    if as_json:
        _tell(dry_run, {"principal": principal, "file": str(target)})
        return
    click.echo(f"{'would write' if dry_run else 'wrote'} {target}")
    if not dry_run:
        click.echo(
            f"now copy {TRUSTED_FILE} to every host (tenuto deploy up does so): a host without the new one refuses this key"
        )


@keys.command()
@_FOLDER
@json_option
def show(folder: Path, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """List whose keys are trusted, and which secrets lie here. A secret is never shown."""
    rows = [
        {
            "principal": key.principal,
            "public": key.public,
            "since": key.since,
            "secret_here": (folder / key_file(key.principal)).exists(),
        }
        for key in _trusted(folder).keys
    ]
    if as_json:
        echo_json({"keys": rows})
        return
    for row in rows:
        here = "secret here" if row["secret_here"] else ""
        click.echo(f"{row['principal']:24} {row['public']}  {row['since']}  {here}".rstrip())


@keys.command()
@_FOLDER
@_PRINCIPAL
@click.option("--out", type=OutputPath(), help="A client's one file; default: NAME.key here.")
@_DRY_RUN
@json_option
def rotate(folder: Path, principal: str, out: Path | None, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001
    """Make a new key for PRINCIPAL; the old one is trusted until `revoke --old`.

    Copy `trusted.json` to every host, restart the principal's processes one by one, then revoke the old key. A client is not
    restarted: its new file takes the place of the old one, and within a second it connects with that. Before frontends
    restart, clients need new files: rotate them too.
    """
    target = _target(folder, principal, out)
    with changing(folder):
        if not _trusted(folder).of(principal):
            raise ConfigError(f"{principal} has no key: add one")
        if not dry_run:
            _add(folder, principal, target)
    trusted = _trusted(folder)
    if dry_run:  # as if it had been made
        trusted = Trusted((TrustedKey(principal, "", ""), *trusted.keys))
    behind = _clients_behind(trusted) if principal == FRONTEND else []
    if as_json:
        _tell(dry_run, {"principal": principal, "file": str(target), "clients_behind": behind})
        return
    then = "replace the client's file by it" if kind_of(principal) == CLIENT else "restart"
    click.echo(
        f"{principal}: {'would make' if dry_run else 'made'} a new key in {target}; now copy {TRUSTED_FILE} to every host, {then}, and"
        f" tenuto keys revoke {folder} {principal} --old"
    )
    if behind:
        names = ", ".join(behind)
        click.echo(f"before the restart rotate also, whose files know the old key only: {names}")


@keys.command()
@_FOLDER
@_PRINCIPAL
@click.option("--old", is_flag=True, help="All but its newest key.")
@click.option("--force", "is_forced", is_flag=True, help="Also the last key of a part of the cluster itself.")
@_DRY_RUN
@json_option
def revoke(folder: Path, principal: str, old: bool, is_forced: bool, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001  click's flags
    """Trust PRINCIPAL's keys no more: refused within a second of `trusted.json` reaching a host.

    The last keys of scheduler, frontend or operator are refused without --force: the cluster would not serve, or not be
    operated, without. A node's and a client's go without it: that is how a host or a user is shut out.
    """
    checked_principal(principal)
    with changing(folder):
        trusted = _trusted(folder)
        known = trusted.of(principal)
        gone = known[1:] if old else known
        if not gone:
            raise ConfigError(f"{principal} has no {'older ' if old else ''}key")
        if principal in _LOST_WITHOUT and not old and not is_forced:
            raise ConfigError(
                f"without a key of {principal} {_LOST_WITHOUT[principal]}: rotate it, restart who has it, and revoke the old one"
                f" (tenuto keys rotate {folder} {principal}); --force revokes all of them all the same"
            )
        left = Trusted(tuple(key for key in trusted.keys if key.public not in gone))
        if not dry_run:
            _write(folder, left)
            if not old:
                (folder / key_file(principal)).unlink(missing_ok=True)
    behind = _clients_behind(left) if principal == FRONTEND else []
    if as_json:
        _tell(dry_run, {"principal": principal, "revoked": gone, "clients_behind": behind})
        return
    click.echo(f"{principal}: {len(gone)} {'would be' if dry_run else ''} revoked".replace("  ", " "))
    if behind:
        click.echo(f"shut out, for their files know no key that is left: {', '.join(behind)}")


def _tell(is_dry: bool, document: dict[str, Any]) -> None:  # noqa: FBT001  whose flag it is
    echo_json({**document, "written": not is_dry, **({"dry_run": True} if is_dry else {})})


def _add(folder: Path, principal: str, path: Path) -> None:
    """Its secret goes to that path once it is trusted: wherever this ends early, what lies there is trusted as before."""
    trusted, pair = _trusted(folder), new_pair(principal)
    since = dt.datetime.now(dt.UTC).date().isoformat()
    if kind_of(principal) == CLIENT:
        frontends = tuple(key for key in trusted.keys if key.principal == FRONTEND)
        pair = KeyPair(principal, pair.public, pair.secret, frontends)
    draft = path.with_name(f"{path.name}.draft")
    try:
        write_private(draft, pair)
        _write(folder, Trusted((TrustedKey(principal, pair.public, since), *trusted.keys)))
        with naming_path(path):
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _clients_behind(trusted: Trusted) -> list[str]:
    """The clients whose newest files were made before the frontends' newest key."""
    principals = [key.principal for key in trusted.keys]  # the newest first
    newest = principals.index(FRONTEND) if FRONTEND in principals else -1
    return [
        name
        for name in dict.fromkeys(principals)
        if kind_of(name) == CLIENT and principals.index(name) > newest
    ]


def _target(folder: Path, principal: str, out: Path | None) -> Path:
    """Where its secret goes; a file of a client's that is there already is somebody's."""
    checked_principal(principal)
    if kind_of(principal) != CLIENT:
        if out is not None:
            raise ConfigError(
                f"--out is for clients; the key of {principal} goes to {folder / key_file(principal)}"
            )
        return folder / key_file(principal)
    path = out or Path(f"{principal.partition('/')[2]}.key")
    if path.exists():
        raise ConfigError(f"{path} is there already: name another file with --out, or take it away")
    return path


def _trusted(folder: Path) -> Trusted:
    return read_trusted(folder / TRUSTED_FILE)


def _write(folder: Path, trusted: Trusted) -> None:
    write_private(folder / TRUSTED_FILE, trusted)
