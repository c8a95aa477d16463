"""A test runs every verb of the command line: it must be called, not only mentioned.

A verb counts as run if its words are arguments of a runner of commands, or in a page that a test follows. Help requests
do not count, nor do lists for another purpose.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Final

import pytest

from polywire.cli.main import app
from tests.e2e.test_first_paths import FIRST_PAGES, FIRST_SPARK_PAGES
from tests.e2e.test_pages import PAGES
from tests.unit.cli.test_lists import SAMPLES, verbs

ROOT: Final = Path(__file__).parents[2]
# Names of functions that run a command, and the words that they prepend.
RUNNERS: Final[dict[str, tuple[str, ...]]] = {
    "run": (),
    "command": (),
    "Popen": (),
    "start": (),
    "answer": (),
    "rows": (),
    "_cluster": ("cluster",),
}
VERBS: Final = sorted(words for words, _ in verbs(app))
COMMAND_LINE: Final = re.compile(r'polywire\.cli|"polywire"')  # in every module that runs a command
WAYS_MAX: Final = 1000  # limit of combinations for one call
UNKNOWN: Final = "\0"  # a word that is only known at run time

Words = tuple[str, ...]


def words_of(node: ast.expr, known: Mapping[str, Sequence[ast.expr]]) -> list[Words]:
    """Return what an argument may become, each as its words."""
    match node:
        case ast.Constant(value=str(word)):
            return [(word,)]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            each = [words_of(part, known) for part in parts]
            return [tuple(chain.from_iterable(chosen)) for chosen in islice(product(*each), WAYS_MAX)]
        case ast.Starred(value=ast.Name(id=name)) | ast.Name(id=name) if name in known:
            others = {other: values for other, values in known.items() if other != name}
            return [words for value in known[name] for words in words_of(value, others)]
        case _:
            return [(UNKNOWN,)]


def names_of(tree: ast.Module) -> Mapping[str, Sequence[ast.expr]]:
    """Return the possible values of names: assigned ones, and those of loops."""
    found: defaultdict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found[name].append(value)
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=values) | ast.List(elts=values)):
                found[name] += values
    return found


def commands_of(source: str) -> Iterator[Words]:
    """Return the commands that the tests of a module run, each as its words."""
    tree = ast.parse(source)
    known = names_of(tree)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in RUNNERS:
            yield from (RUNNERS[name] + words for words in words_of(ast.Tuple(call.args), known))


def commands_of_page(text: str) -> Iterator[Words]:
    """Return the commands that a page runs."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for command in re.findall(r"(?<![\w./-])polywire ([^|&;\n]+)", block):
            yield tuple(command.split())


def runs(command: Words, verb: Words) -> bool:
    """Return whether this runs the verb: its words come first, or after the program."""
    if "--help" in command or "-h" in command:
        return False
    size = len(verb)
    return any(
        command[at : at + size] == verb and (at == 0 or command[at - 1] in ("polywire", UNKNOWN))
        for at in range(len(command) - size + 1)
    )


def all_commands() -> Sequence[Words]:
    """Return the commands of every test, and of every page that is followed."""
    found = [words + arguments for words, arguments in SAMPLES.items()]
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text("utf-8")
        if path != Path(__file__) and COMMAND_LINE.search(text):
            found += commands_of(text)
    for page in (*PAGES, *FIRST_PAGES, *FIRST_SPARK_PAGES):
        found += commands_of_page((ROOT / "docs" / f"{page}.md").read_text("utf-8"))
    return found


def test_every_verb_is_run_by_a_test() -> None:
    commands = all_commands()
    assert [" ".join(verb) for verb in VERBS if not any(runs(command, verb) for command in commands)] == []


@pytest.mark.parametrize(
    ("source", "is_run"),
    [
        ('run(["topic", "list"])', True),
        ('subprocess.run([sys.executable, "-m", "polywire", "topic", "list"])', True),
        ('command("topic", "list", "-o", "json")', True),
        ('COMMAND = (sys.executable, "-m", "polywire")\nPopen([*COMMAND, "topic", "list"])', True),
        ('for words in (["x"], ["list"]):\n    run(["topic", *words])', True),
        ('words = ("topic", "list")\ncommand(*words)', True),
        ('run(["topic", "list", "--help"])', False),
        ('run(["record", "produce", "topic", "list"])', False),
        ('VERBS = ["topic", "list"]', False),
        ('"""Runs topic list: polywire topic list."""', False),
        ('note("topic", "list")', False),
        ('for words in (["topic", "list"],):\n    print(words)', False),
    ],
)
def test_counted_commands(source: str, is_run: bool) -> None:
    assert any(runs(command, ("topic", "list")) for command in commands_of(source)) is is_run


def test_commands_of_a_page() -> None:
    page = (
        "`polywire serve`\n```sh\nseq 3 | polywire record produce t 2> x & sleep 1\n```\n```text\npolywire dev\n```\n"
    )
    assert list(commands_of_page(page)) == [("record", "produce", "t", "2>", "x")]
