"""``polywire completion``: scripts that complete commands and options in shells.

Promises: prints a script, changes no file. Must not know: any noun.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

from polywire.cli.usage import examples

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell that is to read it.")]


def completion_of(whole: App) -> App:
    """The command that prints the completion of a command line."""
    app = App(
        name="completion",
        help_epilogue=examples(
            "source <(polywire completion bash)",
            "polywire completion zsh > ~/.zfunc/_polywire",
            "polywire completion fish | source",
        ),
    )

    @app.default
    def completion(shell: Shell) -> None:
        """Print a script that completes commands and options in a shell."""
        sys.stdout.write(whole.generate_completion(prog_name=whole.name[0], shell=shell))

    return app
