"""Groups of commands whose help says each command's first sentence to its end: click cuts it at the line's."""

from __future__ import annotations

from typing import Final

import click

SENTENCE_CHARS_MAX = 1_000
MEANT: Final = {
    **dict.fromkeys(
        ("check", "validate", "lint"),
        "`tenuto plan FILE` checks a file, `tenuto doctor` a host, `tenuto health` what runs here",
    ),
    **dict.fromkeys(("start", "run", "serve"), "`tenuto up FILE` starts a cluster"),
    **dict.fromkeys(("stop", "kill"), "`tenuto down` ends a cluster"),
    **dict.fromkeys(("ps", "list", "ls"), "`tenuto status` shows what runs"),
}
"""What others call what we have by another name, and where it is; none of these is a command of ours."""


class WholeHelpGroup(click.Group):
    """Lists its commands in as many lines as they need, and names the closest one to a name that is none."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # Not before: whether it is our `fabric` that is imported is asked first.
            from fabric.policy_options import suggestion  # noqa: PLC0415

            meant = MEANT.get(args[0], "")
            closest = (
                f"; {meant}" if meant and ctx.parent is None else suggestion(args[0], self.list_commands(ctx))
            )
            raise click.UsageError(f"{error.message.rstrip('.')}{closest}", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, without its limit."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=SENTENCE_CHARS_MAX))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
