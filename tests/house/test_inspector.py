"""The lists of the house inspector are empty, and it detects what it should."""

from __future__ import annotations

import ast

import pytest

from tools import inspector

REPEATED = """
def {name}({value}: int) -> int:
    '''{text}'''
    total = 0
    for one in range({value}):
        if one % 2:
            total += one
        else:
            total -= {number}
    assert total
    return total + 1
"""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return modules to inspect instead of the checkout's, by their path in the package."""
    texts: dict[str, str] = {}

    def modules(*_: str) -> list[inspector.Module]:
        return [inspector.Module(inspector.SOURCE / "polywire" / path, ast.parse(text)) for path, text in texts.items()]

    monkeypatch.setattr(inspector, "modules", modules)
    monkeypatch.setattr(inspector, "texts_in", lambda *_: "")
    return texts


@pytest.fixture(scope="module")
def lists() -> dict[str, list[inspector.Finding]]:
    """Return what each check finds in this checkout with its exceptions; it takes seconds, so it runs once."""
    return {name: list(check()) for name, check in inspector.CHECKS.items()}


@pytest.mark.parametrize("check", list(inspector.CHECKS))
def test_lists_are_empty(lists: dict[str, list[inspector.Finding]], check: str) -> None:
    assert not [str(found) for found in inspector.not_allowed(lists[check])]


def test_exceptions_are_needed(lists: dict[str, list[inspector.Finding]]) -> None:
    found = {one.name for findings in lists.values() for one in findings}
    needless = inspector.ALLOWED.keys() - found
    assert not needless


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": [], "e": ["e"]}
    assert inspector.circles(graph) == [["a", "b", "c"], ["e"]]


def test_import_circles_for_types_are_found(sources: dict[str, str]) -> None:
    sources["one.py"] = (
        "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polywire.two import Two"
    )
    sources["two.py"] = "from polywire.three import THREE"
    sources["three.py"] = "def three():\n    import polywire.one"
    sources["four.py"] = "from polywire import one"
    assert [str(found) for found in inspector.import_circles()] == [
        "src/polywire/one.py:4 is on a circle with polywire.two",
        "src/polywire/three.py:2 is on a circle with polywire.one",
        "src/polywire/two.py:1 is on a circle with polywire.three",
    ]


def test_unused_code_is_found(sources: dict[str, str]) -> None:
    sources["one.py"] = "LEFT = 1\nUSED = 2\nclass A:\n    def left(self): pass\n    def used(self): pass\nA().used()"
    sources["two.py"] = "from polywire.one import USED\n@register\ndef taken(): pass\ndef __getattr__(name): pass"
    assert [found.name for found in inspector.unused()] == ["LEFT", "A.left"]


def test_unread_fields_are_found(sources: dict[str, str]) -> None:
    sources["one.py"] = (
        "@dataclass\nclass A:\n    left: int\n    used: int\n    matched: int\n"
        "    def f(self):\n        self.set = 1\n        self.set_and_read = 2\n"
        "class B(msgspec.Struct, array_like=True):\n    sent: int\nclass C(msgspec.Struct, frozen=True):\n    value: int"
    )
    sources["three.py"] = "class D(msgspec.Struct):\n    sent: int\nmsgspec.json.encode(D(1))"
    sources["two.py"] = (
        "def f(a: A):\n    a.left = a.used + a.set_and_read\n    match a:\n        case A(matched=1): pass"
    )
    assert [(found.name, found.line) for found in inspector.unread()] == [
        ("A.left", 3),
        ("A.set", 7),
        ("C.value", 12),
    ]


def test_duplicate_functions_are_found(sources: dict[str, str]) -> None:
    sources["one.py"] = REPEATED.format(name="count", value="limit", text="Counts.", number=3)
    sources["two.py"] = REPEATED.format(name="total_of", value="size", text="Says it otherwise.", number=3)
    sources["three.py"] = REPEATED.format(name="other", value="size", text="Another number.", number=4)
    assert [found.name for found in inspector.repeated()] == ["total_of"]


def test_wide_ports_are_found(sources: dict[str, str]) -> None:
    verbs = "".join(f"    def verb{number}(self): ...\n" for number in range(11))
    sources["one.py"] = f"class Wide(Protocol):\n{verbs}class Open:\n{verbs}"
    assert [found.name for found in inspector.wide_ports()] == ["Wide"]


def test_wide_parts_of_the_facade_are_found(sources: dict[str, str]) -> None:
    verbs = "".join(f"    def verb{number}(self): ...\n" for number in range(10))
    sources["broker/broker.py"] = f"class Broker(Narrow, Wide):\n{verbs}    def _own(self): ...\n"
    sources["broker/parts.py"] = f"class Wide(Base):\n{verbs}    def more(self): ...\nclass Narrow:\n{verbs}"
    sources["broker/base.py"] = (
        f"class Base:\n{verbs}    def more(self): ...\nclass Other:\n{verbs}    def more(self): ..."
    )
    assert [found.name for found in inspector.wide_ports()] == ["Wide", "Base"]
