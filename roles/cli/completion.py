"""`tenuto completion SHELL`: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_TENUTO_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes `tenuto`.

    Put it where that shell looks: for bash ~/.local/share/bash-completion/completions/tenuto, for zsh
    "${fpath[1]}/_tenuto", for fish ~/.config/fish/completions/tenuto.fish.
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows all three"
    root = context.find_root().command
    click.echo(found(root, {}, "tenuto", VARIABLE).source())
