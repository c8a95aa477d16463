"""Rules of the code base: sizes, names, words, errors, imports of ``cython``, decision records.

A violation is reported with its file and line. Only a decision record may exempt from a rule, and is named here then.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from polywire import errors

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "polywire"
MODULE_LINES_MAX: Final = 800
FUNCTION_LINES_MAX: Final = 60
NESTING_MAX: Final = 3
NAMES_REFUSED: Final = {"utils", "util", "helpers", "helper", "manager", "handler", "handlers", "common", "misc"}
WORDS_REFUSED: Final = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
BROAD_EXCEPT: Final = {
    "server/connection.py",
    "server/hub.py",
    "server/lifecycle.py",
    "server/readiness.py",
    "cli/main.py",
    "client/queue.py",  # calls handlers of the application
}
WITHOUT_COROUTINES: Final = ("records", "store", "log", "cluster", "broker", "protocols")  # decision 0107
WITHOUT_PATTERNS: Final = {"records", "store", "log", "cluster", "broker", "protocols", "types.py", "matching.py"}
# Access to disks, threads and random numbers in the store and the log goes through ports, of which these are the real
# ends.
WORLD_MODULES: Final = {
    "os",
    "io",
    "fcntl",
    "mmap",
    "shutil",
    "tempfile",
    "threading",
    "queue",
    "concurrent",
    "time",
    "random",
    "secrets",
}
WORLD_MODULES_ALLOWED: Final = {
    "store/system_files.py": {"os", "fcntl", "mmap", "secrets", "concurrent"},
    "store/base.py": {"mmap"},  # page-aligned memory
    "store/url.py": {"os"},  # the environment, which the client library of buckets reads as well
    "store/file.py": {"threading"},  # a lock is not a thread
    "store/blob_cache.py": {"threading"},
    "store/metered.py": {"threading"},
    "log/worker.py": {"threading", "queue"},
    "log/segments/damage.py": {"threading"},
    "log/segments/segment.py": {"threading"},
    "log/segments/compaction.py": {"time"},  # sleeps for 0 s, so that other threads get their turn
}
WORLD_VERBS: Final = {
    *("exists", "is_dir", "is_file", "stat", "iterdir", "glob", "rglob", "mkdir", "unlink", "rmdir"),
    *("read_bytes", "write_bytes", "read_text", "write_text"),
}
PATTERN_MODULES: Final = {"re", "regex", "fnmatch", "glob"}
KINDS: Final = {"Invalid", "Denied", "Missing", "Conflict", "NotOwner", "Busy", "Unavailable", "Corrupt"}
# Written in pieces, so that this file does not break its own rule.
MACHINE: Final = re.compile(
    "|".join(["/" + "work/", "/" + "root/", "/" + "home/", "--index" + "-url", "pypi" + r"\.org/simple"])
)

# A citation names a page of one of these folders and a heading in it; commas separate several.
CITED_FOLDERS: Final = {"spec": "specs", "concepts": "concepts", "protocols": "reference/protocols"}
CITATION: Final = re.compile(r"\b(spec|concepts|protocols): ([\w.-]+#[\w-]+(?:,\s+[\w.-]+#[\w-]+)*)")
CITED_ELSEWHERE: Final = re.compile(
    r"\bdossier|\bdesign(\.md)?[:,]? ?§|\bdesign\.md\b|\.md §", re.IGNORECASE
)  # what no reader has, and headings by a number
CITED_RECORD: Final = re.compile(r"\bdecision (\d{4})\b")

Branch = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES: Final = python_files("src")
EVERYTHING: Final = python_files("src", "tests", "examples", "benchmarks", "tools")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module. Only the worker that runs these tests needs it, so no import makes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def tracked_files() -> list[Path]:
    """Return committed files; without git, all text files."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: cannot tell which files are part of the project")
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def depth(node: ast.AST, level: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (nesting, line) of every branching statement; ``elif`` and nested functions start no deeper level."""
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, Function | ast.Lambda):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1 and isinstance(child, ast.If)
            deeper = level + (isinstance(child, Branch) and not is_elif)
            if deeper > level:
                yield deeper, child.lineno  # type: ignore[attr-defined]
            yield from depth(child, deeper)


def test_modules_are_short() -> None:
    sizes = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in EVERYTHING}
    assert not {name: lines for name, lines in sizes.items() if lines > MODULE_LINES_MAX}


def test_functions_are_short() -> None:
    long = {
        f"{place(path, function.lineno)} {function.name}": lines
        for path in EVERYTHING
        for function in functions(tree_of(path))
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert not long


def test_functions_are_flat() -> None:
    deep = {
        place(path, line): level
        for path in EVERYTHING
        for function in functions(tree_of(path))
        for level, line in depth(function)
        if level > NESTING_MAX
    }
    assert not deep


def test_names_of_files_are_meaningful_nouns() -> None:
    assert not [place(path) for path in EVERYTHING if {path.stem, path.parent.name} & NAMES_REFUSED]


def test_no_todo_is_left() -> None:
    found = [
        place(path, number)
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS_REFUSED.search(line)
    ]
    assert not found


def test_modules_have_a_docstring() -> None:
    """The import contract lists what a module must not import; a docstring lists guarantees."""
    assert not [place(path) for path in SOURCES if not ast.get_docstring(tree_of(path))]


def test_examples_in_docstrings_are_python() -> None:
    found = 0
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                _, mark, example = (ast.get_docstring(node) or "").partition("Example:\n")
                found += bool(mark)
                ast.parse(f"async def example():\n    pass\n{example}")
    assert found > 20


def test_test_modules_have_a_docstring() -> None:
    tests = [path for path in python_files("tests", "examples", "benchmarks", "tools") if path.name != "__init__.py"]
    assert not [place(path) for path in tests if not ast.get_docstring(tree_of(path))]


def test_broad_except_is_used_at_the_edge_only() -> None:
    broad = {"Exception", "BaseException"}
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else broad
            if caught & broad and path.relative_to(PACKAGE).as_posix() not in BROAD_EXCEPT:
                found.append(place(path, node.lineno))
    assert not found


def test_only_the_command_line_prints() -> None:
    found = [
        place(path, node.lineno)
        for path in SOURCES
        if "cli" not in path.parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found


def test_verbs_are_not_coroutines() -> None:
    found = [
        place(path, function.lineno)
        for folder in WITHOUT_COROUTINES
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for function in functions(tree_of(path))
        if isinstance(function, ast.AsyncFunctionDef)
    ]
    assert not found


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (first word, line) of every import, including those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0], node.lineno


def test_the_log_uses_ports_for_the_outside_world() -> None:
    found = []
    for path in [
        path for path in SOURCES if path.is_relative_to(PACKAGE / "store") or path.is_relative_to(PACKAGE / "log")
    ]:
        name = str(path.relative_to(PACKAGE))
        refused = WORLD_MODULES - WORLD_MODULES_ALLOWED.get(name, set())
        found += [place(path, line) for module, line in imports(tree_of(path)) if module in refused]
        if name != "store/system_files.py":
            found += [place(path, line) for line in path_verbs(tree_of(path))]
    assert not found


def path_verbs(tree: ast.AST) -> Iterator[int]:
    """Yield lines that access a disk through a path, or open a file without the port."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=owner, attr=verb) if verb in WORLD_VERBS:
                if not ast.unparse(owner).lower().endswith("files"):
                    yield node.lineno
            case ast.Name(id="open"):
                yield node.lineno
            case _:
                pass


def test_no_regular_expression_is_used_on_client_data() -> None:
    """Backtracking over a few KiB blocks the loop for seconds; ``polywire.matching`` does not backtrack."""
    found = [
        place(path, line)
        for path in SOURCES
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in WITHOUT_PATTERNS
        for name, line in imports(tree_of(path))
        if name in PATTERN_MODULES
    ]
    assert not found


def test_kinds_of_errors_are_the_eight_of_the_code_base() -> None:
    kinds = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.BrokerError)
    }
    assert kinds == KINDS | {"BrokerError"}
    derived = [
        place(path, node.lineno)
        for path in SOURCES
        if path.name != "errors.py" or path.parent != PACKAGE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & KINDS
    ]
    assert not derived


@cache
def kinds_raised() -> dict[str, set[str]]:
    """Return the kinds that each error code is raised as, outside the store, whose errors the log handles."""
    kinds_of = defaultdict(set)
    outer = [path for path in SOURCES if path.relative_to(ROOT / "src").parts[1:2] != ("store",)]
    for node in (node for path in outer for node in ast.walk(tree_of(path))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
            code = re.fullmatch(r"ErrorCode\.([A-Z_]+)", ast.unparse(node.args[0]))
            if code is not None:
                kinds_of[code[1]].add(node.func.id)
    return kinds_of


def test_every_error_code_that_leaves_the_broker_belongs_to_one_kind() -> None:
    found = kinds_raised()
    assert not {code: kinds for code, kinds in found.items() if len(kinds) > 1}
    assert set(found) <= set(errors.ErrorCode.__members__)


def test_no_test_has_its_own_timeout() -> None:
    """A limit that fits one test on an idle machine fails it on a busy one; the run's timeout ends hanging tests."""
    default = int(re.findall(r"^timeout = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0])
    limits = [
        (path.relative_to(ROOT), number, int(limit))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for limit in re.findall(r"mark\.timeout\((\d+)\)", line)
    ]
    assert len(limits) > 1
    assert [limit for limit in limits if limit[2] <= default] == []


def test_tests_are_packages() -> None:
    folders = {path.parent for path in python_files("tests", "benchmarks", "tools")}
    assert not [place(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def test_nothing_names_a_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        found += [place(path, number) for number, line in enumerate(text.splitlines(), 1) if MACHINE.search(line)]
    assert not found


def test_nothing_built_is_committed() -> None:
    assert not [place(path) for path in tracked_files() if path.suffix in {".so", ".c", ".pyc", ".pyd", ".whl"}]


def test_decision_records_are_numbered_without_gaps() -> None:
    records = sorted((ROOT / "docs" / "internals" / "decisions").glob("[0-9]*.md"))
    assert [path.name[:4] for path in records] == [f"{101 + number:04}" for number in range(len(records))]
    index = (ROOT / "docs" / "internals" / "decisions" / "index.md").read_text(encoding="utf-8")
    for path in records:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:4]} — "), place(path)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Rejected", "Consequences"], (
            place(path)
        )
        assert f"]({path.name})" in index, place(path)


def anchors(text: str) -> list[str]:
    """Return the anchors of a page's headings as GitHub makes them, without those in listings."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?)[ #]*$", prose, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_headings_become_anchors() -> None:
    text = "# The Iggy wire\n## Poll messages (`0x64`)\n```\n# no heading\n```\n### user_id & co. ##\n"
    assert anchors(text) == ["the-iggy-wire", "poll-messages-0x64", "user_id--co"]


@cache
def anchors_of(page: Path) -> frozenset[str]:
    return frozenset(anchors(page.read_text(encoding="utf-8"))) if page.is_file() else frozenset()


def unresolved(text: str, docs: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, citation) of citations without a target."""
    for found in CITATION.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        for cited in re.split(r",\s+", found[2]):
            page, _, anchor = cited.partition("#")
            if anchor not in anchors_of(docs / CITED_FOLDERS[found[1]] / f"{page}.md"):
                yield line, f"{found[1]}: {cited}"
    for found in CITED_RECORD.finditer(text):
        if not list((docs / "internals" / "decisions").glob(f"{found[1]}-*.md")):
            yield text.count("\n", 0, found.start()) + 1, found[0]


def test_broken_citations_are_found(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "iggy.md").write_text("# Iggy\n## Poll messages\n## Errors\n", encoding="utf-8")
    text = (
        "(spec: iggy#poll-messages,\n    iggy#errors)\nspec: iggy#faults, iggy#errors. spec: flux#errors. decision 0106"
    )
    assert list(unresolved(text, tmp_path)) == [
        (3, "spec: iggy#faults"),
        (3, "spec: flux#errors"),
        (3, "decision 0106"),
    ]


def test_citations_lead_to_headings() -> None:
    folders = tuple(ROOT / name for name in ("src", "tests", "benchmarks", "tools"))
    found = []
    for path in tracked_files():
        if path == Path(__file__) or path.suffix not in {".py", ".md", ".txt"}:
            continue
        if any(path.is_relative_to(folder) for folder in folders):
            lost = unresolved(path.read_text(encoding="utf-8"), ROOT / "docs")
            found += [f"{place(path, line)} {cited}" for line, cited in lost]
    assert not found


def test_no_text_cites_a_document_that_is_missing() -> None:
    """A section number means nothing without its document: concepts, specifications and decisions are cited by name."""
    folders = tuple(ROOT / name for name in ("src", "tests", "docs", "benchmarks", "tools"))
    found = [
        place(path, number)
        for path in tracked_files()
        if path != Path(__file__) and path.suffix in {".py", ".md"} and any(path.is_relative_to(one) for one in folders)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if CITED_ELSEWHERE.search(line)
    ]
    assert not found


def test_headings_of_specifications_are_unique() -> None:
    twice = {}
    for page in (ROOT / "docs" / "specs").glob("*.md"):
        found = anchors(page.read_text(encoding="utf-8"))
        twice[page.stem] = {anchor for anchor in found if found.count(anchor) > 1}
    assert not any(twice.values()), twice


def test_readme_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text
