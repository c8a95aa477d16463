"""Scatter-gather for Cursus commands that name no topic (decision 0127).

This module decides which shards receive a command, and combines their responses.

* Combined lists equal those of a single broker with all topics.
* A transactional id has the same epoch in every shard that it writes to.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polywire.protocols.cursus.groups import TRANSACTION_KEYS
from polywire.protocols.cursus.messages import Dialect, Refused, Request, decoded, encoded, quote

ERROR: Final = b"ERROR:"
SPANS: Final = "the transaction has staged data in several processes of this broker (abort it)"
PATTERN_SPANS: Final = "the pattern matches topics of several processes of this broker (read the topics one by one)"
NO_MATCH: Final = b"no topics match pattern"
NO_TOPICS: Final = "(no topics)"
GATHERED: Final = frozenset(
    {"LIST", "LIST_GROUPS", "GROUP_STATUS", "INIT_PRODUCER_ID", "BEGIN_TXN", "TXN_STATUS", "END_TXN", "CONSUME"}
)
"""Commands that may need all shards."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to one shard. For ``epoch_min`` see ``CursusSession.epoch_min``."""

    shard: int
    text: bytes
    epoch_min: int = 0


class Gathered(ABC):
    """The combined response of several shards.

    Requests are sent to one shard at a time, in the order of ``_questions``. ``is_blocking`` is whether later requests
    of the client wait.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = list(reversed(questions))
        self._asked: Question | None = None
        self._failure: bytes | None = None
        self.is_blocking = True

    def next_question(self) -> Question | None:
        self._asked = self._questions.pop() if self._questions else None
        return self._asked

    def answered(self, body: bytes) -> None:
        """Process the response to the latest request. After an error, no request is sent to the remaining shards."""
        assert self._asked is not None, "a shard was asked"
        if body.startswith(ERROR):
            self._failure = body
            self._questions.clear()
        else:
            self._take(self._asked, body)

    def whole(self) -> bytes | Refused:
        return self._made() if self._failure is None else self._failure

    @abstractmethod
    def _take(self, asked: Question, body: bytes) -> None: ...

    @abstractmethod
    def _made(self) -> bytes | Refused: ...


class _Names(Gathered):
    """A list with names from every shard.

    The response is ``OK count=<n> <key>=<names>``, or a list of topics in the format of the legacy dialect.
    """

    def __init__(self, questions: Sequence[Question], key: str, dialect: Dialect) -> None:
        super().__init__(questions)
        self._key: Final = key
        self._is_legacy: Final = dialect is Dialect.LEGACY and key == "topics"
        self._names: set[str] = set()

    def _take(self, asked: Question, body: bytes) -> None:
        text = decoded(body)
        if self._is_legacy:
            self._names |= set(text.split(", ")) - {NO_TOPICS}
        else:
            self._names |= set(text.partition(f" {self._key}=")[2].split(",")) - {""}

    def _made(self) -> bytes:
        names = sorted(self._names, key=encoded)
        if self._is_legacy:
            return encoded(", ".join(names) or NO_TOPICS)
        return encoded(f"OK count={len(names)} {self._key}={','.join(names)}")


class _Status(Gathered):
    """GROUP_STATUS: return the status from a shard that has the group.

    If several shards have the group, a status with members is preferred, then the topic whose name sorts first.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        super().__init__(questions)
        self._found: list[tuple[bool, str, bytes]] = []
        self._refusal = b""

    def answered(self, body: bytes) -> None:
        if body.startswith(ERROR):
            self._refusal = self._refusal or body
        else:
            super().answered(body)

    def _take(self, asked: Question, body: bytes) -> None:
        shown = json.loads(decoded(body))
        self._found.append((not shown["members"], shown["topic_name"], body))

    def _made(self) -> bytes:
        return min(self._found)[2] if self._found else self._refusal


class _Epochs(Gathered):
    """INIT_PRODUCER_ID: begin the same epoch in every shard. It is later than any epoch that a shard has known."""

    def __init__(self, questions: Sequence[Question]) -> None:
        super().__init__(questions)
        self._everyone: Final = questions
        self._epochs: dict[int, int] = {}
        self._answer = b""

    def next_question(self) -> Question | None:
        question = super().next_question()
        if question is not None or self._failure is not None:
            return self._with_epoch(question)
        last = max(self._epochs.values())
        self._questions += [one for one in self._everyone if self._epochs[one.shard] < last]
        return self._with_epoch(super().next_question())

    def _with_epoch(self, question: Question | None) -> Question | None:
        if question is None:
            return None
        return Question(question.shard, question.text, max(self._epochs.values(), default=0))

    def _take(self, asked: Question, body: bytes) -> None:
        self._epochs[asked.shard] = int(_word(body, "epoch"))
        self._answer = body

    def _made(self) -> bytes:
        return self._answer


class _Everyone(Gathered):
    """Commands that every shard executes.

    The response with the most staged records and offsets is returned. The other responses are dropped.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        super().__init__(questions)
        self._answers: list[bytes] = []

    def _take(self, asked: Question, body: bytes) -> None:
        self._answers.append(body)

    def _made(self) -> bytes:
        return max(self._answers, key=_held)


class _End(Gathered):
    """END_TXN of a transaction in one shard.

    The shard in which something is staged gets the request first, and its response is returned. If several shards have
    staged something, a commit is refused.
    """

    def __init__(self, everyone: Sequence[Question], status: bytes, *, commits: bool) -> None:
        super().__init__([Question(one.shard, status) for one in everyone])
        self._everyone: Final = everyone
        self._commits: Final = commits
        self._holds: dict[int, int] = {}
        self._spans = False
        self._is_ending = False
        self._answer = b""

    def next_question(self) -> Question | None:
        if not self._questions and not self._is_ending and self._failure is None:
            self._is_ending = True
            self._spans = self._commits and sum(count > 0 for count in self._holds.values()) > 1
            if not self._spans:
                self._questions = sorted(
                    self._everyone, key=lambda one: self._holds[one.shard]
                )  # the last element is asked first
        return super().next_question()

    def answered(self, body: bytes) -> None:
        if not self._answer:  # nothing is staged in the other shards
            super().answered(body)

    def _take(self, asked: Question, body: bytes) -> None:
        if self._is_ending:
            self._answer = body
        else:
            self._holds[asked.shard] = 0 if _word(body, "state") == "aborted" else _held(body)

    def _made(self) -> bytes | Refused:
        if self._spans:
            return Refused("transaction_commit_failed", f"state=open reason={quote(SPANS)}")
        return self._answer


class _Pattern(Gathered):
    """CONSUME with a pattern: return the records of the only shard with matching topics.

    Every shard first gets the request without a waiting time. If only one shard has matching topics, it then gets the
    request with the client's waiting time.
    """

    def __init__(self, count: int, text: bytes, waiting: bytes | None) -> None:
        """``text`` is the request without a waiting time. ``waiting`` is the client's request, if it may wait."""
        super().__init__([Question(shard, text) for shard in range(count)])
        self._waiting = waiting
        self._has: dict[int, bytes] = {}
        self._none = b""
        self.is_blocking = waiting is None

    def answered(self, body: bytes) -> None:
        assert self._asked is not None, "a shard was asked"
        if body.startswith(ERROR) and NO_MATCH in body:
            self._none = body
        else:
            self._has[self._asked.shard] = body

    def next_question(self) -> Question | None:
        if not self._questions and self._waiting is not None and len(self._has) == 1:
            self._questions.append(Question(next(iter(self._has)), self._waiting))
            self._waiting = None
        return super().next_question()

    def _take(self, asked: Question, body: bytes) -> None:
        raise AssertionError("``answered`` processes all responses")

    def _made(self) -> bytes | Refused:
        if len(self._has) > 1:
            return Refused("command_failed", f"reason={quote(PATTERN_SPANS)}")
        return next(iter(self._has.values()), self._none)


def transaction_of(request: Request) -> str:
    return next((request.options[key] for key in TRANSACTION_KEYS if request.options.get(key)), "")


def gathering(count: int, request: Request, text: bytes) -> Gathered | None:
    """Return the object that combines the responses of all shards to a request.

    Returns None if one shard can execute the request, or if every shard would refuse it. ``text`` is the request as it
    was received.
    """
    everyone = [Question(shard, text) for shard in range(count)]
    name = transaction_of(request)
    match request.name:
        case "LIST" if not request.options.get("topic"):
            return _Names(everyone, "topics", request.dialect)
        case "LIST_GROUPS":
            return _Names(everyone, "groups", request.dialect)
        case "GROUP_STATUS":
            return _Status(everyone)
        case "INIT_PRODUCER_ID" if name:
            return _Epochs(everyone)
        case "BEGIN_TXN" | "TXN_STATUS" if name:
            return _Everyone(everyone)
        case "END_TXN" if name:
            commits = request.options.get("result", "commit").lower() == "commit"
            return _End(everyone, _status(request, name), commits=commits)
        case "CONSUME" if request.pattern and request.dialect is not Dialect.LEGACY:
            if request.options.get("wait_ms", "0") == "0":
                return _Pattern(count, text, None)
            words = [word for word in request.words if not word.startswith("wait_ms=")]
            return _Pattern(count, encoded(" ".join(("CONSUME", *words))), text)
        case _:
            return None


def _status(request: Request, name: str) -> bytes:
    words = [f"{key}={request.options[key]}" for key in ("principal", "auth_token") if key in request.options]
    return encoded(" ".join((f"TXN_STATUS transactional_id={name}", *words)))


def _word(body: bytes, key: str) -> str:
    return next((word.partition("=")[2] for word in decoded(body).split() if word.startswith(f"{key}=")), "")


def _held(body: bytes) -> int:
    return int(_word(body, "messages") or 0) + int(_word(body, "offsets") or 0)
