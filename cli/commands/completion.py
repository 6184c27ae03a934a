"""``ckpt completion``: the script that makes a shell complete ``ckpt``."""

from __future__ import annotations

import click

from ckptstore.cli.arguments import command as make_command
from ckptstore.cli.output import emit

_WHERE = {
    "bash": "ckpt completion bash > ~/.local/share/bash-completion/completions/ckpt",
    "zsh": "ckpt completion zsh > ~/.zfunc/_ckpt   # a folder of $fpath",
    "fish": "ckpt completion fish > ~/.config/fish/completions/ckpt.fish",
}


@make_command("completion", examples=[*_WHERE.values(), 'eval "$(ckpt completion bash)"   # this shell only'])
@click.argument("shell", type=click.Choice(list(_WHERE)))
def command(shell: str, as_json: bool) -> None:
    """Print the completion script of a shell.

    It completes commands, options, stores and folders, and of the store already typed the REFs, tags, ranges and names
    of tensors.
    """
    from click.shell_completion import get_completion_class

    from ckptstore.cli import shell_completion
    from ckptstore.cli.main import cli

    shell_completion.register()
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    completer = kind(cli, {}, "ckpt", "_CKPT_COMPLETE")
    # source() of bash starts bash to ask for its version; the template alone is what is printed.
    script = completer.source_template % completer.source_vars()
    if as_json:
        emit({"shell": shell, "script": script})
    else:
        click.echo(script)
