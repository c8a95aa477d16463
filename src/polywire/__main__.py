"""``python -m polywire``: the same command as ``polywire``."""

from polywire.cli.main import main

if __name__ == "__main__":
    main()
