"""``polywire completion``: shell scripts that complete commands and options."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from polywire.cli.usage import examples

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to print the script for.")]

_ZSH_ENDING: Final = """
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then
  _cyclopts_{program} "$@"
else
  compdef _cyclopts_{program} {program}
fi
"""


def completion_of(program_app: App) -> App:
    """Return the command that prints completion scripts for ``program_app``."""
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
        program = program_app.name[0]
        script = program_app.generate_completion(prog_name=program, shell=shell).rstrip("\n")
        sys.stdout.write(f"{script}\n{_ending(program_app, program, shell)}")

    return app


def _ending(program_app: App, program: str, shell: str) -> str:
    """Return lines that the generated script lacks.

    zsh runs a file from its function path as the body of the function, but a script that is sourced must register its
    function. fish suggests file names instead of subcommands unless -f is set.
    """
    if shell == "zsh":
        return _ZSH_ENDING.format(program=program)
    if shell == "fish":
        prefixes = ["", *(f" {name}" for name in _subcommands(program_app) if _subcommands(program_app[name]))]
        return "".join(f"complete -c {program} -n '__fish_{program}_using_command{prefix}' -f\n" for prefix in prefixes)
    return ""


def _subcommands(app: App) -> list[str]:
    return [name for name in app if not name.startswith("-")]
