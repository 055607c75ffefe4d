"""docs/reference/commands.md: every command with its arguments and options, from click."""

from __future__ import annotations

from collections.abc import Iterator

import click

from docs.generate.text import paragraphs, table
from roles.cli.group import COMMANDS, tenuto

HEAD = """# Commands

Every command of `tenuto`, as `tenuto COMMAND --help` says it. Where there is a `--json`, the result alone goes to stdout, in the form that
[design, section 10](../design.md#10-files-commands-json-exit-codes) has; remarks and progress go to stderr. How a command ends: [exit codes](errors.md#exit-codes).
"""


def commands_page() -> str:
    """The page."""
    parts = [HEAD]
    root = click.Context(tenuto, info_name="tenuto")
    for name in sorted(COMMANDS):
        command = tenuto.get_command(root, name)
        assert command is not None
        parts += map(_section, _with_inner(click.Context(command, info_name=name, parent=root)))
    return "\n".join(parts)


def _with_inner(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            inner = context.command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _with_inner(click.Context(inner, info_name=name, parent=context))


def _section(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    rows = [_row(one, context) for one in options if not one.hidden and "--help" not in one.opts]
    text = paragraphs(command.help or "")
    return "\n".join(
        [f"## {context.command_path}\n", f"`{usage}`\n", f"{text}\n", table(("option", "meaning"), rows)]
    )


def _row(option: click.Option, context: click.Context) -> tuple[str, str]:
    names, meaning = option.get_help_record(context) or ("", "")
    return f"`{names}`", meaning
