"""``polywire completion``: scripts that complete commands and options in shells.

Promises: prints a script, changes no file. Must not know: any noun.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from polywire.cli.usage import examples

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell that is to read it.")]

_ZSH_ENDING: Final = """
if [[ ${{zsh_eval_context[-1]}} == loadautofunc ]]; then
  _cyclopts_{program} "$@"
else
  compdef _cyclopts_{program} {program}
fi
"""


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
        program = whole.name[0]
        script = whole.generate_completion(prog_name=program, shell=shell).rstrip("\n")
        sys.stdout.write(f"{script}\n{_ending(whole, program, shell)}")

    return app


def _ending(whole: App, program: str, shell: str) -> str:
    """What the generated script lacks: zsh reads a file on its path as the body of a function, which then has to do the work, and a script
    that is read by hand has to say what it completes; fish offers files where a command is to be named."""
    if shell == "zsh":
        return _ZSH_ENDING.format(program=program)
    if shell == "fish":
        places = ["", *(f" {name}" for name in _words(whole) if _words(whole[name]))]
        return "".join(f"complete -c {program} -n '__fish_{program}_using_command{place}' -f\n" for place in places)
    return ""


def _words(app: App) -> list[str]:
    """The commands in this one."""
    return [name for name in app if not name.startswith("-")]
