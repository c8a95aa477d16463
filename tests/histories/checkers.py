"""The checks of every history.

Each checker is a pure function from a history to sentences about what is wrong with it (concepts: durability#what-a-crash-may-take,
durability#delivery, groups#positions).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tests.histories.history import (
    POWER_LOSS,
    Assignment,
    Commit,
    Fault,
    Fetch,
    History,
    Outcome,
    Place,
    Position,
    Produce,
    Shared,
    Transaction,
)

Checker = Callable[[History], Iterator[str]]


def acknowledged_is_there(history: History) -> Iterator[str]:
    """Check that durably acknowledged records are at their offsets in the end."""
    stored = _stored(history)
    values = _places_by_value(history)
    for produce in history.of(Produce):
        if produce.outcome is not Outcome.DONE or not produce.durable:
            continue
        for value, place in zip(produce.values, produce.places, strict=bool(produce.places)):
            if stored.get(place) != value:
                yield f"{produce.who}: acknowledged {value!r} is not at {place} but {stored.get(place)!r}"
        for value in () if produce.places else produce.values:
            if not values.get((produce.topic, value)):
                yield f"{produce.who}: acknowledged {value!r} is nowhere in {produce.topic}"


def nothing_comes_twice(history: History) -> Iterator[str]:
    """Check that no value is stored twice: clients request each once, unless the broker promised idempotence."""
    for (topic, value), places in _places_by_value(history).items():
        if len(places) > 1:
            yield f"{value!r} is in {topic} more than once: {places}"


def nothing_is_invented(history: History) -> Iterator[str]:
    """Check that stored records were requested and not refused. Topics of transactions have their own check."""
    asked: dict[str, set[bytes]] = defaultdict(set)
    refused: dict[str, set[bytes]] = defaultdict(set)
    for produce in history.of(Produce):
        (refused if produce.outcome is Outcome.REFUSED else asked)[produce.topic].update(produce.values)
    for (topic, value), places in _places_by_value(history).items():
        if topic in asked and value not in asked[topic]:
            said = "was refused" if value in refused[topic] else "was never asked for"
            yield f"{value!r} at {places[0]} {said}"


def partitions_are_ordered(history: History) -> Iterator[str]:
    """Check that acknowledged records are in the order of requests, and of values within a request."""
    requests = list(history.of(Produce))
    request_of = {(p.topic, value): (at, row) for at, p in enumerate(requests) for row, value in enumerate(p.values)}
    for (topic, partition), records in history.stored.items():
        latest, latest_value = -1, b""
        rows: dict[int, int] = {}
        for offset, value in records:
            at, row = request_of.get((topic, value), (-1, 0))
            if at < 0:
                continue
            produce = requests[at]
            if produce.outcome is Outcome.DONE and produce.ended < latest:
                yield f"{value!r} at {Place(topic, partition, offset)} was acknowledged before {latest_value!r} was asked for"
            if rows.get(at, -1) >= row:
                yield f"{value!r} at {Place(topic, partition, offset)} is out of order within its request"
            rows[at] = row
            if produce.begun > latest:
                latest, latest_value = produce.begun, value


def offsets_are_given_once(history: History) -> Iterator[str]:
    """Check that an offset has the same record in every response, and that none is missing in the end."""
    reported: dict[Place, bytes] = {}
    for place, value in _reported(history):
        if reported.setdefault(place, value) != value:
            yield f"{place} was {reported[place]!r} and {value!r}"
    for (topic, partition), records in history.stored.items():
        if [offset for offset, _ in records] != list(range(len(records))):
            yield f"{topic}/{partition} has holes"


def what_was_shown_stays(history: History) -> Iterator[str]:
    """Check that a reader gets every record from its offset on, and finds it again later."""
    stored = _stored(history)
    for fetch in history.of(Fetch):
        topic, partition, first = fetch.place
        if list(fetch.offsets) != list(range(first, first + len(fetch.offsets))):
            yield f"{fetch.who}: asked for {fetch.place} and was shown offsets {fetch.offsets[:3]}…"
        for offset, value in zip(fetch.offsets, fetch.values, strict=True):
            if stored.get(Place(topic, partition, offset)) != value:
                yield f"{fetch.who}: {value!r} was shown at {Place(topic, partition, offset)} and is not there"


def partitions_have_one_owner(history: History) -> Iterator[str]:
    """Check that a partition belongs to one member in a generation."""
    owners: dict[tuple[Shared, int], str] = {}
    for reported in history.of(Assignment):
        for partition in reported.partitions:
            shared = Shared(reported.group, reported.topic, partition)
            owner = owners.setdefault((shared, reported.generation), reported.who)
            if owner != reported.who:
                yield f"{shared} is {owner}'s and {reported.who}'s in generation {reported.generation}"


def generations_go_on(history: History) -> Iterator[str]:
    """Check that no generation is reported after a later one."""
    by_group = defaultdict(list)
    for reported in history.of(Assignment):
        by_group[reported.group, reported.topic].append((reported.begun, reported.ended, reported.generation))
    for group, reported_all in by_group.items():
        yield from (f"{group}: generation {text}" for text in _backwards(reported_all, reported_all))


def stale_commits_are_refused(history: History) -> Iterator[str]:
    """Check that no offset is stored under a superseded generation, or for another member's partition."""
    begun_at: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    owners: dict[tuple[Shared, int], str] = {}
    for reported in history.of(Assignment):
        begun_at[reported.group, reported.topic].append((reported.ended, reported.generation))
        owners |= {
            (Shared(reported.group, reported.topic, number), reported.generation): reported.who
            for number in reported.partitions
        }
    commits = sorted((commit for commit in history.of(Commit)), key=lambda commit: commit.begun)
    for key, reported_at in begun_at.items():
        reported_at.sort()
        at, newest = 0, 0
        for commit in (one for one in commits if one.shared[:2] == key and one.outcome is Outcome.DONE):
            while at < len(reported_at) and reported_at[at][0] < commit.begun:
                newest = max(newest, reported_at[at][1])
                at += 1
            if commit.generation < newest:
                yield f"{commit.who}: a commit of {commit.shared} under {commit.generation} was accepted after {newest} was reported"
            owner = owners.get((commit.shared, commit.generation), commit.who)
            if owner != commit.who:
                yield f"{commit.who}: stored {commit.shared}, which is {owner}'s in {commit.generation}"


def positions_never_go_back(history: History) -> Iterator[str]:
    """Check that a fetched group offset is not behind one reported or stored before, and was committed by a member."""
    known: dict[Shared, list[tuple[int, int, int]]] = defaultdict(list)
    asked: dict[Shared, list[tuple[int, int, int]]] = defaultdict(list)
    wanted: dict[Shared, set[int]] = defaultdict(lambda: {0})
    for commit in history.of(Commit):
        wanted[commit.shared].add(commit.offset)
        if commit.outcome is Outcome.DONE:
            known[commit.shared].append((commit.begun, commit.ended, commit.offset))
    for transaction in history.of(Transaction):
        for shared, offset in transaction.positions:
            wanted[shared].add(offset)
            if transaction.outcome is Outcome.DONE:
                known[shared].append((transaction.begun, transaction.ended, offset))
    for reported in history.of(Position):
        asked[reported.shared].append((reported.begun, reported.ended, reported.offset or 0))
    last = max((event.ended for event in history.events), default=0) + 1
    for shared, at in history.positions.items():
        asked[shared].append((last, last, at or 0))
    for shared, answers in asked.items():
        yield from (f"{shared}: position {text}" for text in _backwards(known[shared] + answers, answers))
        strange = {offset for _, _, offset in answers} - wanted[shared]
        if strange:
            yield f"{shared}: no member committed {sorted(strange)}"


def refused_positions_stay_out(history: History) -> Iterator[str]:
    """Check that no fetched offset comes from refused commits only."""
    taken: dict[Shared, set[int]] = defaultdict(lambda: {0})
    refused: dict[Shared, set[int]] = defaultdict(set)
    for commit in history.of(Commit):
        (refused if commit.outcome is Outcome.REFUSED else taken)[commit.shared].add(commit.offset)
    reported = [(position.shared, position.offset or 0) for position in history.of(Position)]
    reported += [(shared, offset or 0) for shared, offset in history.positions.items()]
    for shared, at in reported:
        if at in refused[shared] - taken[shared]:
            yield f"{shared}: stands at {at}, which was refused"


def groups_read_everything(history: History) -> Iterator[str]:
    """Check that records below a group's offset were delivered to one of its members."""
    shown: dict[Shared, set[int]] = defaultdict(set)
    for fetch in history.of(Fetch):
        if fetch.member_of:
            shown[Shared(fetch.member_of, *fetch.place[:2])].update(fetch.offsets)
    for shared, seen in shown.items():
        missed = set(range(history.positions.get(shared) or 0)) - seen
        if missed:
            yield f"{shared}: stands at {history.positions[shared]}, and no member was shown {sorted(missed)[:5]}"


def transactions_are_whole(history: History) -> Iterator[str]:
    """Check that committed transactions are stored, others are not, and doubtful ones are all or nothing."""
    values = _places_by_value(history)
    shown = {(fetch.place.topic, value) for fetch in history.of(Fetch) for value in fetch.values}
    for transaction in history.of(Transaction):
        written = {(write.topic, write.value) for write in transaction.writes}
        there = {key for key in written if key in values}
        what = f"{transaction.who}: of {len(written)} records of a transaction {{}} are there, {transaction.writes[:1]}"
        if transaction.outcome is Outcome.DONE and there != written:
            yield what.format(f"which was committed only {len(there)}")
        elif transaction.outcome is Outcome.REFUSED and (there or written & shown):
            yield what.format(f"which was not committed {len(there)}")
        elif there and there != written:
            yield what.format(f"in doubt {len(there)}")


def transactions_only_are_there(history: History) -> Iterator[str]:
    """Check that topics of transactions contain nothing else."""
    written: dict[str, set[bytes]] = defaultdict(set)
    for transaction in history.of(Transaction):
        for write in transaction.writes:
            written[write.topic].add(write.value)
    for (topic, value), places in _places_by_value(history).items():
        if topic in written and value not in written[topic]:
            yield f"{value!r} at {places[0]} is of no transaction"


def sources_are_consumed_once(history: History) -> Iterator[str]:
    """Check that each record below the transactional offset was copied once, in order, and none above it."""
    values = _places_by_value(history)
    made: dict[Shared, list[tuple[Place, int]]] = defaultdict(list)
    for transaction in history.of(Transaction):
        for shared, _ in transaction.positions:
            made.setdefault(shared, [])
        for write in transaction.writes:
            places = values.get((write.topic, write.value), [])
            made[Shared(transaction.who, *write.source[:2])] += [(place, write.source.offset) for place in places]
    for shared, found in made.items():
        position = history.positions.get(shared) or 0
        offsets = sorted(offset for _, offset in found)
        if offsets != list(range(position)):
            strange = sorted(set(offsets) ^ set(range(position)))[:5]
            yield f"{shared}: stands at {position}, {len(offsets)} records were made, not once each are {strange}"
        by_target: dict[tuple[str, int], int] = {}
        for place, offset in sorted(found):
            if by_target.get(place[:2], -1) >= offset:
                yield f"{shared}: {offset} is out of order at {place}"
            by_target[place[:2]] = offset


def only_the_end_is_lost(history: History) -> Iterator[str]:
    """Check that a power loss takes the end of the log: no record survives that was requested after a lost one was stored.

    It is no part of ``CHECKERS``, which permit no loss at all.
    """
    stored = set(_places_by_value(history))
    done = [produce for produce in history.of(Produce) if produce.outcome is not Outcome.REFUSED]
    after = 0
    for loss in [fault for fault in history.of(Fault) if fault.who == POWER_LOSS]:
        before = [produce for produce in done if after <= produce.begun < loss.begun]
        lost = [one for one in before if one.outcome is Outcome.DONE and (one.topic, one.values[-1]) not in stored]
        if lost:
            first = min(lost, key=lambda produce: produce.ended)
            later = [one for one in before if one.begun > first.ended]
            survivors = [value for one in later for value in one.values if (one.topic, value) in stored]
            yield from (
                f"{value!r} survives, and {first.values[-1]!r}, stored before it, is lost" for value in survivors
            )
        after = loss.ended


CHECKERS: Final[tuple[Checker, ...]] = (
    acknowledged_is_there,
    nothing_comes_twice,
    nothing_is_invented,
    partitions_are_ordered,
    offsets_are_given_once,
    what_was_shown_stays,
    partitions_have_one_owner,
    generations_go_on,
    stale_commits_are_refused,
    positions_never_go_back,
    refused_positions_stay_out,
    groups_read_everything,
    transactions_are_whole,
    transactions_only_are_there,
    sources_are_consumed_once,
)


def judge(history: History, checkers: Sequence[Checker] = CHECKERS) -> list[str]:
    """Return everything that is wrong with a history, with the name of the promise."""
    return [f"{checker.__name__}: {text}" for checker in checkers for text in checker(history)]


def _stored(history: History) -> dict[Place, bytes]:
    return {
        Place(topic, partition, offset): value
        for (topic, partition), records in history.stored.items()
        for offset, value in records
    }


def _places_by_value(history: History) -> dict[tuple[str, bytes], list[Place]]:
    found: dict[tuple[str, bytes], list[Place]] = defaultdict(list)
    for place, value in _stored(history).items():
        found[place.topic, value].append(place)
    return found


def _reported(history: History) -> Iterator[tuple[Place, bytes]]:
    """Return every record with a reported offset, and the final content."""
    for produce in history.of(Produce):
        yield from zip(produce.places, produce.values, strict=False)
    for fetch in history.of(Fetch):
        for offset, value in zip(fetch.offsets, fetch.values, strict=True):
            yield fetch.place._replace(offset=offset), value
    yield from _stored(history).items()


def _backwards(known: Sequence[tuple[int, int, int]], asked: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    """Return numbers (begun, ended, number) reported although a greater one was known before the request."""
    by_end = sorted(known, key=lambda one: one[1])
    at = greatest = 0
    for begun, _, number in sorted(asked):
        while at < len(by_end) and by_end[at][1] < begun:
            greatest = max(greatest, by_end[at][2])
            at += 1
        if number < greatest:
            yield f"{number} was reported after {greatest}"
