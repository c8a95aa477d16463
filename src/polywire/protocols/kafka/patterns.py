"""Match names with the part of RE2's syntax that clients use (spec: kafka#patterns, decision 0117).

A pattern becomes a nondeterministic automaton. The matcher tracks all states that the automaton can be in, so matching
takes linear time. Sets of states and their successors are cached, so that most characters of a name need one look-up.

A pattern must match the whole name. The size of a pattern and the work for one name are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

PATTERN_CHARACTERS_MAX: Final = 2_000
STATES_MAX: Final = 4_000  # states of a pattern, after the expansion of counted repetitions
DEPTH_MAX: Final = 50  # depth of nested groups
COUNT_MAX: Final = 1_000  # count of a repetition, as in RE2
WALK_STATES_MAX: Final = 20_000  # states visited for one name, about 5 ms
KNOWN_STATES_MAX: Final = 50_000  # states in the cached sets, about 3 MB
_CLASSES: Final[dict[str, Callable[[str], bool]]] = {
    "d": lambda c: "0" <= c <= "9",
    "w": lambda c: c == "_" or (c.isascii() and c.isalnum()),
    "s": lambda c: c in "\t\n\f\r ",
}
_CHARACTERS: Final = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_REPEATS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_END: Final = ""

Check = Callable[[str], bool]


class PatternError(Exception):
    """A pattern is malformed, or matching it takes too long."""


class _State:
    """A state of the automaton.

    Attributes:
        check: tests the character that leads to ``next``. Without it, ``next`` and ``other`` are reached without a
            character.
        edge: ``^`` or ``$`` if the state can only be passed at that end of the name, otherwise empty.
    """

    __slots__ = ("check", "edge", "next", "other")

    def __init__(self, check: Check | None = None) -> None:
        self.check = check
        self.edge = ""
        self.next: _State | None = None
        self.other: _State | None = None


class Pattern:
    """A compiled pattern."""

    __slots__ = ("_begin", "_end", "_known", "_known_states", "_start", "text")

    def __init__(self, text: str) -> None:
        """Compile a pattern. Raises PatternError if it is malformed."""
        if len(text) > PATTERN_CHARACTERS_MAX:
            raise PatternError(f"pattern is too long limit={PATTERN_CHARACTERS_MAX}")
        self.text: Final = text
        self._start, self._end = _Reader(text).read()
        self._known: dict[
            frozenset[_State], dict[str, frozenset[_State]]
        ] = {}  # cached steps: states → character → states
        self._known_states = 0  # number of states in these sets, at most ``KNOWN_STATES_MAX``
        self._begin = self._reached([self._start], first=True, last=False, left=WALK_STATES_MAX)[0]

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name. Raises PatternError if that takes too long."""
        if not name:
            return self._end in self._reached([self._start], first=True, last=True, left=WALK_STATES_MAX)[0]
        states, left = self._begin, WALK_STATES_MAX
        for character in name[:-1]:
            states, left = self._step(states, character, left)
            if not states:
                return False
        reached = [state.next for state in states if state.check is not None and state.check(name[-1]) and state.next]
        return self._end in self._reached(reached, first=False, last=True, left=left)[0]

    def _step(self, states: frozenset[_State], character: str, left: int) -> tuple[frozenset[_State], int]:
        """Return the states after one character, and how many more states may be visited."""
        known = self._known.get(states)
        if known is None:
            known = self._known[states] = {}
        found = known.get(character)
        if found is None:
            reached = [
                state.next for state in states if state.check is not None and state.check(character) and state.next
            ]
            found, left = self._reached(reached, first=False, last=False, left=left - len(states))
            known[character] = found
            self._known_states += len(found) + 1
            if self._known_states > KNOWN_STATES_MAX:
                self._known.clear()
                self._known_states = 0
        return found, left

    def _reached(
        self, states: Iterable[_State], *, first: bool, last: bool, left: int
    ) -> tuple[frozenset[_State], int]:
        """Return these states and those reached from them without a character, and how many more may be visited."""
        seen: set[_State] = set()
        todo = list(states)
        while todo:
            state = todo.pop()
            if state in seen or (state.edge == "^" and not first) or (state.edge == "$" and not last):
                continue
            seen.add(state)
            if state.check is None:
                todo += [other for other in (state.next, state.other) if other is not None]
        left -= len(seen)
        if left < 0:
            raise PatternError("pattern takes too long to match a name (simplify it)")
        return frozenset(seen), left


class _Part:
    __slots__ = ("first", "last")

    def __init__(self, first: _State, last: _State) -> None:
        self.first = first
        self.last = last


class _Reader:
    """The parser of a pattern. Raises PatternError for a pattern that needs more than ``STATES_MAX`` states."""

    __slots__ = ("_at", "_count", "_depth", "_ignores_case", "_text")

    def __init__(self, text: str) -> None:
        self._text: Final = text
        self._at = 0
        self._count = 0
        self._depth = 0
        self._ignores_case = False

    def read(self) -> tuple[_State, _State]:
        if self._text.startswith("(?i)"):
            self._ignores_case, self._at = True, len("(?i)")
        part = self._either()
        if self._at < len(self._text):
            raise self._wrong("closing parenthesis without an opening one")
        return part.first, part.last

    # States

    def _state(self, check: Check | None = None) -> _State:
        self._count += 1
        if self._count > STATES_MAX:
            raise PatternError(f"pattern is too complex (use smaller counts in repetitions) states_max={STATES_MAX}")
        return _State(check)

    def _empty(self) -> _Part:
        state = self._state()
        return _Part(state, state)

    def _of(self, check: Check) -> _Part:
        state, last = self._state(check), self._state()
        state.next = last
        return _Part(state, last)

    # Grammar

    def _either(self) -> _Part:
        made = self._sequence()
        while self._take("|"):
            other = self._sequence()
            first, last = self._state(), self._state()
            first.next, first.other = made.first, other.first
            made.last.next = other.last.next = last
            made = _Part(first, last)
        return made

    def _sequence(self) -> _Part:
        made = self._empty()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._repeated()
            made.last.next = part.first
            made = _Part(made.first, part.last)
        return made

    def _repeated(self) -> _Part:
        """Parse an element and the repetition after it, if there is one."""
        begin = self._at
        part = self._element()
        end = self._at
        while (counts := self._counts()) is not None:
            least, most = counts
            self._take("?")  # a lazy repetition makes no difference, because the whole name must match
            part = self._times(part, begin, end, least, most)
            end = self._at
        return part

    def _times(self, part: _Part, begin: int, end: int, least: int, most: int | None) -> _Part:
        """Return ``least`` to ``most`` copies of a part. To make a copy, its text is parsed again."""
        if (least, most) in ((0, None), (1, None), (0, 1)):
            return self._loop(part, least=least, most=most)
        made = self._empty()
        copies = least if most is None else most
        for number in range(copies):
            copy = self._parse_again(begin, end)
            if number >= least:
                copy = self._loop(copy, least=0, most=1)
            elif most is None and number == copies - 1:
                copy = self._loop(copy, least=1, most=None)
            made.last.next = copy.first
            made = _Part(made.first, copy.last)
        return made

    def _loop(self, part: _Part, *, least: int, most: int | None) -> _Part:
        first, last = self._state(), self._state()
        first.next = part.first
        if not least:
            first.other = last
        part.last.next = last
        if most is None:
            part.last.other = first if least == 0 else part.first
        return _Part(first, last)

    def _parse_again(self, begin: int, end: int) -> _Part:
        at, self._at = self._at, begin
        part = self._repeated_until(end)
        self._at = at
        return part

    def _repeated_until(self, end: int) -> _Part:
        part, begin = self._element(), self._at
        while self._at < end:
            counts = self._counts()
            assert counts is not None, "these counts were parsed before"
            self._take("?")
            part = self._times(part, begin, self._at, *counts)
        return part

    def _counts(self) -> tuple[int, int | None] | None:
        """Parse the bounds of a repetition, or return None if there is none."""
        sign = self._peek()
        if sign in _REPEATS and sign:
            self._at += 1
            return _REPEATS[sign]
        close = self._text.find("}", self._at)
        if sign != "{" or close < 0:
            return None
        least, comma, most = self._text[self._at + 1 : close].partition(",")
        if not (_is_number(least) and (not most or _is_number(most))):
            return None
        found = int(least), int(most) if most else (None if comma else int(least))
        if max(found[0], found[1] or 0) > COUNT_MAX or (found[1] is not None and found[0] > found[1]):
            raise self._wrong("count of a repetition is out of range")
        self._at = close + 1
        return found

    def _element(self) -> _Part:
        sign = self._peek()
        self._at += 1
        match sign:
            case "(":
                return self._group()
            case "[":
                return self._of(self._class())
            case ".":
                return self._of(lambda c: c != "\n")
            case "^" | "$":
                return self._edge(sign)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._wrong("repetition without an element before it")
        return self._of(self._exactly(sign))

    def _edge(self, sign: str) -> _Part:
        part = self._empty()
        part.first.edge = sign
        return part

    def _group(self) -> _Part:
        if self._take("?"):
            if self._text.startswith("P<", self._at) or self._text.startswith("<", self._at):
                close = self._text.find(">", self._at)
                name = self._text[self._at : close].lstrip("P<")
                if close < 0 or not name.isidentifier():
                    raise self._wrong("unsupported kind of group (use (…), (?:…) or (?P<name>…))")
                self._at = close + 1
            elif not self._take(":"):
                raise self._wrong("unsupported kind of group (use (…), (?:…) or (?P<name>…))")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise PatternError(f"groups are nested too deeply limit={DEPTH_MAX}")
        made = self._either()
        self._depth -= 1
        if not self._take(")"):
            raise self._wrong("group has no closing parenthesis")
        return made

    def _escape(self) -> _Part:
        sign = self._peek()
        if sign in "AzZ" and sign:
            self._at += 1
            return self._edge("^" if sign == "A" else "$")
        if sign == "Q":
            return self._quoted()
        return self._of(self._escaped())

    def _quoted(self) -> _Part:
        r"""Parse ``\Q…\E``: the text between is literal."""
        close = self._text.find("\\E", self._at)
        close = len(self._text) if close < 0 else close
        made = self._empty()
        for character in self._text[self._at + 1 : close]:
            part = self._of(self._exactly(character))
            made.last.next = part.first
            made = _Part(made.first, part.last)
        self._at = min(close + 2, len(self._text))
        return made

    def _escaped(self) -> Check:
        sign = self._peek()
        self._at += 1
        if sign.lower() in _CLASSES and sign:
            check = _CLASSES[sign.lower()]
            return check if sign.islower() else lambda c: not check(c)
        return self._exactly(self._literal(sign))

    def _literal(self, sign: str) -> str:
        if sign in _CHARACTERS:
            return _CHARACTERS[sign]
        if sign == _END or (sign.isascii() and sign.isalnum()):
            raise self._wrong("invalid escape sequence")
        return sign

    def _exactly(self, character: str) -> Check:
        if self._ignores_case:
            folded = character.casefold()
            return lambda c: c.casefold() == folded
        return lambda c: c == character

    def _class(self) -> Check:
        """Parse ``[a-z_]`` or ``[^0-9]``, which may contain escapes."""
        is_not = self._take("^")
        checks: list[Check] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            checks.append(self._class_item())
        self._at += 1
        return lambda c: any(check(c) for check in checks) is not is_not

    def _class_item(self) -> Check:
        sign = self._peek()
        if sign == _END:
            raise self._wrong("character class has no closing bracket")
        if self._text.startswith("[:", self._at):
            raise self._wrong("named character classes are not supported (use \\d, \\w or \\s)")
        self._at += 1
        if sign == "\\" and self._peek().lower() in _CLASSES and self._peek():
            return self._escaped()
        low = self._class_character(sign)
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return self._exactly(low)
        self._at += 1
        sign = self._peek()
        self._at += 1
        high = self._class_character(sign)
        if low > high:
            raise self._wrong("range of characters is in the wrong order")
        if self._ignores_case:
            return lambda c: low <= c.lower() <= high or low <= c.upper() <= high
        return lambda c: low <= c <= high

    def _class_character(self, sign: str) -> str:
        if sign != "\\":
            return sign
        self._at += 1
        return self._literal(self._text[self._at - 1 : self._at])

    # Input

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _wrong(self, message: str) -> PatternError:
        return PatternError(f"{message} at={self._at}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(COUNT_MAX))
