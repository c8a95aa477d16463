"""The ``polywire`` command: one file per noun."""
