"""`tenuto deploy k8s`: manifests for those who have a cluster manager."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from deploy.k8s.file_contents import gather
from deploy.k8s.manifests import ManifestFile, deletion, manifests
from deploy.k8s.names import APP
from deploy.k8s.requirements import checked_image, checked_namespace, wanted_of
from deploy.ssh.config_bundle import Source
from fabric.errors import ConfigError
from fabric.keys import naming_path
from roles.cli.json_output import echo_json
from roles.cli.options import file_argument, json_option, remark

_Check = Callable[[str], str]


def _checked(check: _Check) -> Callable[[click.Context, click.Parameter, str], str]:
    def checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
        del context, parameter
        try:
            return check(value)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error

    return checked


@click.command()
@file_argument
@click.option(
    "--namespace",
    default=APP,
    show_default=True,
    callback=_checked(checked_namespace),
    help="Where all of it goes; make it before.",
)
@click.option(
    "--image",
    required=True,
    metavar="IMAGE",
    callback=_checked(checked_image),
    help="What the pods run: see deploy/k8s/Containerfile.",
)
@click.option(
    "--output",
    default="-",
    metavar="DIR|-",
    help="A folder for the files, made where it is missing; - prints them all.  [default: -]",
)
@json_option
def k8s(file: Path, namespace: str, image: str, output: str, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """Write FILE's cluster as manifests of Kubernetes; nothing is asked or changed there. Apply them with `kubectl apply --server-side -f`.

    The keys' Secrets are among them, so a terminal is not printed to.
    """
    if output == "-" and sys.stdout.isatty():
        raise click.UsageError(
            "the manifests hold secret keys, and this is a terminal: give --output DIR, or pipe them on"
        )
    wanted = wanted_of(Source.of(file), namespace, image)
    files = manifests(wanted, gather(wanted))
    remark(wanted.remarks)
    objects = [one for each in files for one in each.objects]
    if output != "-":
        folder = Path(output)
        for each in files:
            _write(folder, each)
        listed = [{"kind": one["kind"], "name": one["metadata"]["name"]} for one in objects]
        if as_json:
            echo_json(
                {
                    "namespace": namespace,
                    "files": [str(folder / one.name) for one in files],
                    "objects": listed,
                }
            )
        else:
            click.echo(
                f"{len(objects)} objects in {len(files)} files in {folder}; once they are applied, this deletes agents of nodes"
                f" as the file has none any more: {deletion(wanted)}",
                err=True,
            )
    elif as_json:
        echo_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        click.echo("---\n".join(one.text for one in files), nl=False)


def _write(folder: Path, file: ManifestFile) -> None:
    """Whole or not at all. Raises ConfigError where it cannot be, with the path."""
    path = folder / file.name
    draft = path.with_name(f".{path.name}.draft")
    with naming_path(path):
        folder.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if file.is_secret else 0o644
        )
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(file.text)
        draft.replace(path)
