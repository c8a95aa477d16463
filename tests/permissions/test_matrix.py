"""The page of permissions is what happens: every command of every wire, played as everybody, against real sessions."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from polywire.broker.permissions import Action
from polywire.http.endpoints import PREFIX
from tests.permissions.cases import HTTP_PAGES, SECRET, Case, Outcome, Player, cases, commands, expected
from tests.permissions.players import play
from tests.unit.http.site import Site

CASES = list(cases())


def test_every_command_of_every_wire_is_played() -> None:
    for wire, table in commands().items():
        played = {case.command for case in CASES if case.wire == wire}
        assert set(table) == played, wire


def test_everything_that_is_answered_over_http_is_played() -> None:
    site = Site()
    try:
        app = site.application._guard._app
        assert isinstance(app, Starlette)
        paths = {route.path for route in app.routes if isinstance(route, Route)}
        assert len(paths) == len(app.routes)
    finally:
        site.close()
    assert paths == {*HTTP_PAGES, PREFIX + "/{rest:path}"}, "a path that is not in the page"


def test_every_command_names_its_actions() -> None:
    nameless = [(wire, name) for wire, table in commands().items() for name, actions in table.items() if not actions]
    assert nameless == []
    asked = {action for table in commands().values() for actions in table.values() for action in actions}
    assert asked == set(Action), "an action that nothing asks for belongs to nobody"


@pytest.mark.parametrize("player", Player)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.wire}-{case.command}-{case.action.word}")
def test_everybody_may_do_what_the_table_says(case: Case, player: Player) -> None:
    found, answer = play(case, player)
    wanted = expected(case, player)
    assert found is (Outcome.YES if wanted is Outcome.OWN else wanted), answer
    if player in (Player.NO_CALLER, Player.OTHER) and case.action is not Action.CONNECT:
        assert SECRET not in answer.replace(b"shop.orders", b""), "a refusal may say what was asked for, no more"
        if wanted is Outcome.OWN:
            assert b"shop" not in answer.replace(b"shop*", b"")
