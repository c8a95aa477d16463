"""The types of Kafka's messages match the table of messages, and handlers have the types of their requests."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.factory import COMMANDS, FORWARDED_COMMANDS, ROUTED_COMMANDS
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.session import Command
from tools import kafka_types


def test_the_stub_is_up_to_date() -> None:
    assert kafka_types.STUB.read_text("utf-8") == kafka_types.stub(), "run `python -m tools.kafka_types`"


@pytest.mark.parametrize("commands", [COMMANDS, ROUTED_COMMANDS, FORWARDED_COMMANDS])
def test_handlers_have_the_type_of_their_request(commands: Mapping[Api, Command]) -> None:
    """The table of handlers cannot express this type, so the type checker does not see a handler of another request."""
    typed = {
        api: inspect.signature(command.handler).parameters["request"].annotation for api, command in commands.items()
    }
    wrong = {api: name for api, name in typed.items() if name not in (schema.request(api).__name__, "Any")}
    assert not wrong
