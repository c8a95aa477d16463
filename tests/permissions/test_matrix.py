"""The page of permissions matches every command of every protocol for every player."""

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


def test_every_command_of_every_protocol_has_a_case() -> None:
    for wire, table in commands().items():
        played = {case.command for case in CASES if case.wire == wire}
        assert set(table) == played, wire


def test_every_http_path_has_a_case() -> None:
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
    assert asked == set(Action), "an action that no command needs"


@pytest.mark.parametrize("player", Player)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.wire}-{case.command}-{case.action.word}")
def test_every_player_is_permitted_what_the_table_says(case: Case, player: Player) -> None:
    found, answer = play(case, player)
    wanted = expected(case, player)
    assert found is (Outcome.YES if wanted is Outcome.OWN else wanted), answer
    if player in (Player.NO_CALLER, Player.OTHER) and case.action is not Action.CONNECT:
        assert SECRET not in answer.replace(b"shop.orders", b""), "a refusal may repeat the request, and nothing else"
        if wanted is Outcome.OWN:
            assert b"shop" not in answer.replace(b"shop*", b"")
