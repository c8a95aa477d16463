"""The ``polywire`` command, with one module for each subcommand."""
