"""The house inspector: finds import circles, unused code, unread fields, repeated functions and wide interfaces.

It reads syntax trees and imports nothing. Each finding names its file and line. ``make house`` prints all findings;
tests/house requires that there are none except those that ``ALLOWED`` explains.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "src"
REPEATED_LINES_MIN: Final = 8
PORT_VERBS_MAX: Final = 10
FACADE: Final = "Broker"
ENCODERS: Final = frozenset({"msgspec.json", "msgspec.msgpack"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A finding. ``name``: what ``ALLOWED`` refers to."""

    path: str
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.text}"


@dataclass(frozen=True, slots=True)
class Module:
    """One file and its syntax tree."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        """The name for imports."""
        parts = self.path.relative_to(SOURCE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def finding(self, line: int, name: str, text: str) -> Finding:
        """Return a finding in this module."""
        return Finding(self.path.relative_to(ROOT).as_posix(), line, name, text)


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """Return all modules in some folders of the checkout."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(Module(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


@cache
def nodes(module: Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's tree, which every check visits."""
    return tuple(ast.walk(module.tree))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (module or imported name, line) of every import, also inside functions and for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


# Circles


def import_graph(found: Sequence[Module]) -> Mapping[str, Mapping[str, int]]:
    """Return the imports of each module with their lines, including those inside functions and for types."""
    known = {module.name for module in found}
    graph: dict[str, dict[str, int]] = {}
    for module in found:
        others = graph[module.name] = {}
        for name, line in imported(module.tree):
            other = name if name in known else name.rpartition(".")[0]
            if other in known:
                others.setdefault(other, line)
    return graph


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that contain a cycle."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        left = list(graph[start])
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += graph[name]
        reached[start] = seen
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def import_circles() -> Iterator[Finding]:
    """Find modules that import each other, also for types: they cannot be read or tested one by one."""
    found = {module.name: module for module in modules("src")}
    graph = import_graph(list(found.values()))
    for circle in circles(graph):
        for name in circle:
            others = {other: line for other, line in graph[name].items() if other in circle}
            text = f"is on a circle with {', '.join(others)}"
            yield found[name].finding(min(others.values()), name, text)


# Unused code: a definition whose name appears nowhere else, neither as a name, an attribute nor a word of a text.


def names_used() -> Counter[str]:
    """Count the uses of each name: as a name, an attribute, an import, or a word of a text."""
    found: Counter[str] = Counter()
    others = [one for one in modules("src", "examples", "benchmarks", "tools") if one.path != Path(__file__).resolve()]
    for module in others:
        for node in nodes(module):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    found[name] += 1
                case ast.alias(name=name):
                    found[name.rpartition(".")[2]] += 1
                case ast.MatchClass(kwd_attrs=names):
                    found.update(names)
                case ast.Constant(value=str(text)) if len(text) < 80:
                    found.update(re.findall(r"[A-Za-z_]\w*", text))
                case _:
                    pass
    return found


def texts_in(*folders: str) -> str:
    """Return all Markdown text in some folders."""
    return "\n".join(path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.md"))


def definitions(module: Module) -> Iterator[tuple[str, str, int]]:
    """Yield (name with its class, name, line) of the functions, methods, classes and constants of a module."""

    def inside(body: list[ast.stmt], within: str) -> Iterator[tuple[str, str, int]]:
        for node in body:
            match node:
                case ast.ClassDef(name=name):
                    yield within + name, name, node.lineno
                    yield from inside(node.body, f"{within}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield within + name, name, node.lineno
                case ast.AnnAssign(target=ast.Name(id=name)) if not within:
                    yield name, name, node.lineno
                case ast.Assign(targets=[ast.Name(id=name)]) if not within:
                    yield name, name, node.lineno
                case _:
                    pass

    return inside(module.tree.body, "")


def is_called_by_others(module: Module) -> Callable[[str], bool]:
    """Return a predicate for names with callers outside the checkout: a decorator registers them, or a base class calls
    them.
    """
    taken = set()
    for node in nodes(module):
        if isinstance(node, Function) and any("property" not in ast.unparse(one) for one in node.decorator_list):
            taken.add(node.name)
        if isinstance(node, ast.ClassDef):
            foreign = [ast.unparse(base).partition("[")[0] for base in node.bases]
            if any(base.startswith(("asyncio.", "ast.", "DataSource", "Simple", "logging.")) for base in foreign):
                taken.update(one.name for one in node.body if isinstance(one, Function))
    return lambda name: name in taken


def unused() -> Iterator[Finding]:
    """Find definitions that the package, its tools and examples do not use. Tests do not count; user pages do."""
    used, pages = (
        names_used(),
        set(re.findall(r"\w+", texts_in("docs/reference/protocols", "docs/spark", "docs/operate", "docs/get-started"))),
    )
    for module in modules("src"):
        called = is_called_by_others(module)
        for full, name, line in definitions(module):
            dunder = name.startswith("__") and name.endswith("__")
            if used[name] or dunder or called(name) or (name in pages and not name.startswith("_")):
                continue
            yield module.finding(line, full, f"{full} is not used")


# Unread fields: assigned, but never read.


def fields_read() -> Counter[str]:
    """Count the reads of each attribute name."""
    found: Counter[str] = Counter()
    for module in modules("src", "examples", "benchmarks", "tools"):
        for node in nodes(module):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    found[name] += 1
                case ast.MatchClass(kwd_attrs=names):
                    found.update(names)
                case _:
                    pass
    return found


def fields_of(kind: ast.ClassDef) -> Mapping[str, int]:
    """Return the fields of a class with the lines of their declarations or first assignments."""
    declared = {
        node.target.id: node.lineno
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for method in kind.body:
        for node in ast.walk(method) if isinstance(method, Function) else ():
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    declared.setdefault(name, node.lineno)
                case _:
                    pass
    declared.pop("_", None)  # marks the fields after it as keyword-only
    return declared


def is_encoded(kind: ast.ClassDef, *, encodes: bool) -> bool:
    """Return whether values of a class are encoded as a whole. ``encodes``: whether its module encodes structs."""
    bases = {ast.unparse(base) for base in kind.bases}
    has_format = bool({word.arg for word in kind.keywords} - {"frozen", "eq"})
    return bool({"Head", "TypedDict"} & bases) or ("msgspec.Struct" in bases and (encodes or has_format))


def unread() -> Iterator[Finding]:
    """Find fields that the package, its tools and examples do not read.

    Fields that are encoded as a whole, or passed as keyword arguments, are read by their receivers.
    """
    read = fields_read()
    for module in modules("src"):
        kinds = [node for node in nodes(module) if isinstance(node, ast.ClassDef)]
        encodes = any(ast.unparse(node) in ENCODERS for node in nodes(module) if isinstance(node, ast.Attribute))
        kinds = [kind for kind in kinds if not is_encoded(kind, encodes=encodes)]
        left = [(kind.name, name, line) for kind in kinds for name, line in fields_of(kind).items() if not read[name]]
        for kind_name, name, line in left:
            yield module.finding(line, f"{kind_name}.{name}", f"{kind_name}.{name} is not read")


# Repeated functions: equal trees, except for names.


class _Nameless(ast.NodeTransformer):
    """Replaces names by numbers in order, and removes docstrings and types."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, f"n{len(self._numbers)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Attribute(self.visit(node.value), self._number("." + node.attr), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._number(node.arg))


def body_of(function: Function) -> list[ast.stmt]:
    """Return the statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def outline(function: Function) -> object:
    """Return the kinds of a function's statements. Functions of the same shape have the same outline."""
    return tuple(type(statement) for statement in body_of(function))


def shape(function: Function) -> str:
    """Return the tree of a function's body and parameters without names, docstrings and types."""
    body = body_of(function)
    numbered = _Nameless()
    parameters = [
        numbered.visit(one) for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
    copied = [numbered.visit(ast.parse(ast.unparse(node)).body[0]) for node in body]
    return "\n".join(ast.dump(node) for node in (*parameters, *copied))


def lines_of(function: Function) -> int:
    """Return the lines of a function without its docstring; 0 for a function without a body, as in a protocol."""
    body = body_of(function)
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def repeated() -> Iterator[Finding]:
    """Find functions of eight lines or more whose trees are equal except for names."""
    alike: dict[object, list[tuple[Module, Function]]] = defaultdict(list)
    for module in modules("src"):
        for node in nodes(module):
            if isinstance(node, Function) and lines_of(node) >= REPEATED_LINES_MIN:
                alike[outline(node)].append((module, node))
    places: dict[str, list[tuple[Module, Function]]] = defaultdict(list)
    for candidates in alike.values():
        for module, function in candidates if len(candidates) > 1 else ():
            places[shape(function)].append((module, function))
    for found in places.values():
        first, original = found[0]
        for module, function in found[1:]:
            where = f"{first.name}:{original.name}"
            yield module.finding(function.lineno, function.name, f"{function.name} is {where} again")


# Wide interfaces


def parts_of(facade: str, kinds: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return a facade and the classes that it consists of."""
    bases = [ast.unparse(base) for base in kinds[facade].bases] if facade in kinds else []
    return {facade}.union(*(parts_of(base, kinds) for base in bases))


def wide_ports() -> Iterator[Finding]:
    """Find protocols, and parts of the broker's facade, with more than ten methods of their own. Constructors,
    properties and plain values do not count.
    """
    sources = modules("src")
    broker = [module for module in sources if module.name.startswith("polywire.broker.")]
    kinds = {node.name: node for module in broker for node in nodes(module) if isinstance(node, ast.ClassDef)}
    parts = [kinds[name] for name in parts_of(FACADE, kinds) if name in kinds]
    for module in sources:
        for node in nodes(module):
            if not isinstance(node, ast.ClassDef):
                continue
            if node not in parts and "Protocol" not in {ast.unparse(base).partition("[")[0] for base in node.bases}:
                continue
            verbs = [one for one in node.body if isinstance(one, Function) and not one.decorator_list]
            if node in parts:
                verbs = [one for one in verbs if not one.name.startswith("_")]
            if len(verbs) > PORT_VERBS_MAX:
                yield module.finding(node.lineno, node.name, f"port {node.name} has {len(verbs)} verbs")


CHECKS: Final[Mapping[str, Callable[[], Iterator[Finding]]]] = {
    "import circles": import_circles,
    "unused code": unused,
    "unread fields": unread,
    "repeated functions": repeated,
    "wide ports": wide_ports,
}


_SHIPPED = "shipped for the tests of who uses the package"
_CALLED = "called by the library whose class it derives from"
_SHOWN = "what tests look at: nothing else tells whether memory was given back"
_ANSWER = "one field of an answer of the wire, between others that are read"
_OPTION = "read by its name, made of the wire's"
_ORACLE = "one call of what runs inside compiled loops, for tests to compare with other implementations"
_DRAWN = "one place of a drawn layout, between others that are used"

ALLOWED: Final[Mapping[str, str]] = {
    "LinkReport.shifted": "printed and returned as JSON",
    "PlannedTopic.creates": "printed as JSON",
    "PlannedTopic.other_settings": "printed as JSON",
    "stale_modules": "asked by the test suite before it runs: compiled modules older than their sources",
    "BulkConnection.produce_all": "for users, beside the verbs that Spark uses",
    "BrokerThread.disconnect": "for users",
    "forget_memory": "for users",
    "BrokerThread.lose_acknowledgement": "for users",
    "pytest_configure": "called by pytest",
    "MemoryObjects.heal": "for users: cancels the faults that have not happened yet",
    "Page.value_bytes": "for users of the admin API, whose answer the page is",
    "BLOCK_ENTRIES": "a size that tests of the edges of blocks need",
    "TailIndex.drop_slot": "drop_front by what a slot holds, for tests of the index alone",
    "scan_to_offset": _ORACLE,
    "TOPIC_SIZE": _DRAWN,
    "ACKS_SIZE": _DRAWN,
    "SEQ_START": _DRAWN,
    "SEQ_END": _DRAWN,
    "PRODUCER_SIZE": _DRAWN,
    "LAST_SIZE": _DRAWN,
    "put_chunks": "put_more in one call, for property tests and the fuzz target",
    "BALANCED": "a partitioning that users of the codec may ask for",
    "crc32_at": _ORACLE,
    "crc32_column": _ORACLE,
    "BATCH_MAGIC": _DRAWN,
    "PRODUCER_ID_BYTES_MAX": _DRAWN,
    "WIDE_BYTES_MIN": _DRAWN,
    "_MURMUR3": _DRAWN,
    "xxh3_own": _ORACLE,
    "ProgressListener.onQueryStarted": _CALLED,
    "ProgressListener.onQueryProgress": _CALLED,
    "ProgressListener.onQueryIdle": _CALLED,
    "ProgressListener.onQueryTerminated": _CALLED,
    "FoldProcessor.handleInitialState": _CALLED,
    "FoldProcessor.handleInputRows": _CALLED,
    "PAYLOAD_BYTES": _DRAWN,
    "StreamSeen.topic_count": _ANSWER,
    "StreamSeen.size_bytes": _ANSWER,
    "StreamSeen.message_count": _ANSWER,
    "TopicSeen.size_bytes": _ANSWER,
    "TopicSeen.message_count": _ANSWER,
    "PartitionSeen.segment_count": _ANSWER,
    "PartitionSeen.current_offset": _ANSWER,
    "PartitionSeen.size_bytes": _ANSWER,
    "PartitionSeen.message_count": _ANSWER,
    "Polled.current_offset": _ANSWER,
    "Tls.flux_tls": _OPTION,
    "Tls.cursus_tls": _OPTION,
    "Tls.iggy_tls": _OPTION,
    "Tls.kafka_tls": _OPTION,
    "Tls.kafka07_tls": _OPTION,
    "Tls.polywire_tls": _OPTION,
    "crc32c_by_tables": "what processors without the instruction take; held against the other by a test",
    "SPLIT_BYTES": "a compiled constant under a name that tests read",
    "JOIN_BYTES": "see SPLIT_BYTES",
    "FaultyStore": _SHIPPED,
    "MemoryLog.take_snapshot": _SHIPPED,
}
"""Accepted findings: the name within its module, and the reason."""


def not_allowed(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are not accepted, in the order of files."""
    return sorted(one for one in found if one.name not in ALLOWED)


def main() -> int:
    """Print every list; return 0 if all are empty."""
    lists = {name: not_allowed(check()) for name, check in CHECKS.items()}
    for check, found in lists.items():
        print(f"{check}: {len(found)}")
        for one in found:
            print(f"  {one}")
    return int(any(lists.values()))


if __name__ == "__main__":
    sys.exit(main())
