"""The command line as a whole: help, usage, messages and exit codes that need no broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from cyclopts import App

from polywire.__main__ import main
from polywire.build_info import VERSION
from polywire.choices import listed
from polywire.cli.connection import CONNECT_VARIABLE
from polywire.cli.main import NOUNS, POSIX_MODULES, app, run
from polywire.cli.serve import Durability, Wires
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import Dialect
from polywire.types import Level

UNUSED = "127.0.0.1:1"  # nothing listens on this port


def commands(parent: App, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name in parent:
        if not name.startswith("-"):
            yield from commands(parent[name], *words, name)


@pytest.mark.parametrize("words", list(commands(app)), ids=" ".join)
def test_help_has_examples_and_fits_eighty_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    _, title, rest = shown.rpartition("\nExample")
    assert title, "no example"
    examples, title, codes = rest.partition("\nExit codes:\n")
    assert title, "no exit codes"
    assert [int(line.split()[0]) for line in codes.splitlines() if line][:3] == [EXIT_DONE, EXIT_FAILED, EXIT_USAGE]
    lines = [line for line in examples.splitlines()[1:] if line]
    assert lines
    assert all(line.startswith("  ") and "polywire " in line for line in lines)


GENERATED_MAX = 40  # dataclasses, where the standard functions for dataclasses are needed
LISTED = """\
import sys
from polywire.cli.main import app
from polywire.cli.main import run
groups = [()]
for words in groups:  # parents first, so that a listing cannot depend on a loaded subcommand
    print("listed", *words)
    run([*words, "--help"])
    parent = app
    for word in words:
        parent = parent[word]
    if parent.default_command is None:
        groups += [(*words, name) for name in parent if not name.startswith("-")]
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("polywire.cli.main", "asyncio polywire.client.polywire rich.progress"),
        ("polywire.cli.top", "asyncio polywire.client.polywire"),
        ("polywire.cli.cluster", "polywire.log polywire.cluster.migration"),
        ("polywire.cli.connection", "polywire.client.iggy polywire.client.kafka"),
        ("polywire.cli.serve", "argon2 pygments rich"),
        ("polywire.client.bulk", "asyncio pyarrow"),
    ],
)
def test_a_module_that_starts_quickly_loads_nothing_heavy(module: str, heavy: str) -> None:
    """Every command waits for these imports, and so does every Spark worker for the last."""
    program = f"import sys, {module}; print(*sys.modules.keys() & set({heavy.split()}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize(
    ("word", "hint"),
    [("topics", ", did you mean 'topic'?"), ("completio", ", did you mean 'completion'?"), ("frobnicate", "")],
)
def test_an_unknown_command_is_refused_without_loading_the_others(word: str, hint: str) -> None:
    program = (
        "import sys; from polywire.cli.main import run; print(run(sys.argv[1:]), 'polywire.cli.serve' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, word], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    known = listed([*NOUNS, "completion"])
    assert done.stderr == f"error: no such command{hint} command={word!r} known={known} (see --help)\n"


def test_a_start_generates_the_code_of_few_classes() -> None:
    """A frozen dataclass takes forty times as long to create as a msgspec.Struct."""
    program = (
        "import sys, polywire.cli.serve\n"
        "classes = {kind for module in list(sys.modules.values()) for kind in vars(module).values()"
        " if isinstance(kind, type) and '__dataclass_params__' in vars(kind)}\n"
        "print(*sorted(kind.__qualname__ for kind in classes if kind.__module__.startswith('polywire.')))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert len(made) <= GENERATED_MAX, made


def test_the_imports_of_a_start_trigger_no_garbage_collection() -> None:
    program = (
        "import contextlib, gc, sys, polywire.__main__\n"
        "runs = []\n"
        "gc.callbacks.append(lambda phase, info: runs.append(phase))\n"
        "sys.argv = ['polywire', 'serve', '--partitions', '0']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    polywire.__main__.main()\n"
        "assert 'polywire.server.lifecycle' in sys.modules\n"
        "print(len(runs))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "0", printed


def test_every_listing_describes_its_commands() -> None:
    """Including those that are imported only when they run."""
    listed = subprocess.run(
        [sys.executable, "-c", LISTED],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
        env=os.environ | {"COLUMNS": "200"},
    ).stdout
    without = []
    for shown in listed.split("listed")[1:]:
        words, _, text = shown.partition("\n")
        _, title, panel = text.partition(" Commands ")
        rows = [line.strip("│ ").split() for line in panel.partition("╰")[0].splitlines()[1:]]
        without += [f"{words} {row[0]}" for row in rows if len(row) == 1]
        assert bool(title) is bool(rows)
    assert listed.count(" Commands ") > 10
    assert not without


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_includes_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == EXIT_DONE
    script = capsys.readouterr().out
    assert "polywire" in script
    assert not [noun for noun in app if not noun.startswith("-") and noun not in script]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="NO ZSH: its completion was not tried")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("_arguments() { print arguments; }; autoload -U _polywire; _polywire", "arguments"),
        ('compdef() { print -r -- "$@"; }; source ./_polywire', "_cyclopts_polywire polywire"),
    ],
    ids=["on the path", "by hand"],
)
def test_zsh_completion_works_autoloaded_and_sourced(
    script: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An autoloaded file runs the completion function; a sourced file registers it."""
    assert run(["completion", "zsh"]) == EXIT_DONE
    (tmp_path / "_polywire").write_text(capsys.readouterr().out)
    command = ["zsh", "-f", "-c", f"fpath=($PWD $fpath); {script}"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=180, check=False)
    assert completed.stdout.decode().strip() == expected, completed.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="NO FISH: its completion was not tried")
@pytest.mark.parametrize(("typed", "offered"), [("", "topic"), ("record ", "consume"), ("top --output ", "json")])
def test_fish_completion_offers_no_files(
    typed: str, offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", "fish"]) == EXIT_DONE
    script = tmp_path / "polywire.fish"
    script.write_text(capsys.readouterr().out)
    command = f"source {script}; complete -C 'polywire {typed}'"
    completed = subprocess.run(["fish", "-c", command], cwd=tmp_path, capture_output=True, timeout=180, check=True)
    words = [line.split("\t")[0] for line in completed.stdout.decode().splitlines()]
    assert offered in words
    assert script.name not in words


def test_completion_for_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]) == EXIT_USAGE
    assert "csh" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([option]) == EXIT_DONE
    assert capsys.readouterr().out.strip() == VERSION


@pytest.mark.parametrize(
    "words",
    [
        ["topics"],
        ["topic", "create"],
        ["topic", "create", "t", "--partitions", "many"],
        ["topic", "create", "t", "--compression", "gzip"],
        ["topic", "create", "t", "--retention-hours", "-1"],
        ["topic", "create", "t", "--retention-mib", "-1"],
        ["topic", "list", "--output", "xml"],
        ["record", "consume", "t", "--count", "0"],
        ["serve", "--durability", "memory"],
        ["serve", "--cursus-dialect", "old"],
        ["serve", "--cursus-compression", "zip"],
    ],
    ids=" ".join,
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["topic", "create"], "error: topic create needs NAME. (see --help)"),
        (["record", "copy", "here"], "error: record copy needs TARGET. (see --help)"),
        (["group", "list", "there"], "error: unexpected argument 'there'. (see --help)"),
        (
            ["topic", "create", "t", "-p"],
            'error: Command "topic create" parameter -p requires an argument. (see --help)',
        ),
    ],
)
def test_usage_errors_name_arguments_as_the_help_does(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == EXIT_USAGE
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["topic", "list", "-a", UNUSED],
            "cannot connect: connection refused (check that a broker is running there) address=",
        ),
        (
            ["topic", "list", "-a", f"flux://{UNUSED}"],
            "cannot connect: connection refused (check that a broker is running there) address=",
        ),
        (["topic", "list", "-a", f"http://{UNUSED}"], "unknown scheme scheme=http"),
        (["topic", "list", "-a", "nowhere"], "code=invalid_request"),
        (["record", "consume", "t", "--from", "noon"], "start position is invalid"),
        (["backup", "list", "no-such-directory"], "directory of backups does not exist path='no-such-directory'"),
        (
            ["user", "remove", "me", "--users", "no-such-file"],
            "error: No such file or directory file='no-such-file'",
        ),
    ],
)
def test_failures_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONNECT_VARIABLE, "0")
    assert run(words) == EXIT_FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err


@pytest.mark.parametrize("seconds", ["soon", "-1", "inf", "nan"])
def test_an_invalid_connect_timeout_is_rejected(
    seconds: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONNECT_VARIABLE, seconds)
    assert run(["topic", "list", "-a", UNUSED]) == EXIT_FAILED
    assert f"the connect timeout must be a number of seconds POLYWIRE_CONNECT_S='{seconds}'" in capsys.readouterr().err


def test_an_interrupt_during_import_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "polywire.cli.main", Loading())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_INTERRUPTED


def test_every_durability_is_a_level() -> None:
    assert {Level[durability.name] for durability in Durability} == set(Level) - {Level.MEMORY, Level.STORED}


def choices(options: type, name: str) -> set[str]:
    """Return the choices of an option."""
    return set(get_args(get_type_hints(options)[name]))


def test_choices_match_the_supported_values() -> None:
    assert choices(Wires, "cursus_dialect") == {"auto", *(dialect.value for dialect in Dialect)}
    for name in choices(Wires, "cursus_compression") - {"auto"}:
        assert algorithm(name).name == name


WINDOWS = """
import sys

for name in {missing!r}:
    sys.modules[name] = None
import polywire.client.client, polywire.client.consumer, polywire.client.producer, polywire.client.blocking
from polywire.cli.main import run
from polywire.client.connect import SCHEMES
for scheme in SCHEMES:
    __import__(f"polywire.client.{{scheme}}")
for noun in ("topic", "record", "group", "transaction", "writer", "top", "bench"):
    assert run([noun, "--help"]) == 0, noun
for noun in {nouns!r}:
    assert run([noun]) == 1, noun
"""


def test_client_commands_work_without_posix_modules() -> None:
    """Commands that serve or open a log report that they need Linux or macOS."""
    nouns = ("serve", "dev", "doctor", "backup", "segment", "log")
    program = WINDOWS.format(missing=(*POSIX_MODULES, "uvloop", "pwd", "grp", "termios"), nouns=nouns)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("needs Linux or macOS") == done.stderr.count("\n") == len(nouns)
