"""Logins: SaslHandshake and SaslAuthenticate with PLAIN and SCRAM (spec: kafka#sasl).

After a failed login, the client gets an error response and the connection is closed. The response does not show whether
the user exists.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from polywire.broker.access import Principal
from polywire.broker.scram import Mechanism
from polywire.errors import BrokerError, Busy, PeerError
from polywire.protocols.kafka import sasl, schema
from polywire.protocols.kafka.messages import Api, Refused, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.sasl import PLAIN, Challenge, Step
from polywire.protocols.kafka.session import KafkaSession


def sasl_handshake(session: KafkaSession, answer: Answer, request: Any, /) -> Any:
    response = schema.response(Api.SASL_HANDSHAKE)
    conversation = session.sasl
    error = WireError.NONE
    try:
        conversation.enter(Step.AGREED)
    except Refused as refused:
        error = refused.error
    if request.mechanism not in sasl.MECHANISMS:
        error = WireError.UNSUPPORTED_SASL_MECHANISM
    if error is not WireError.NONE:
        session.end(answer)
    conversation.mechanism = request.mechanism
    conversation.is_bare = answer.request.version < sasl.BARE_SINCE
    return response(error=error, mechanisms=list(sasl.MECHANISMS))


def sasl_authenticate(session: KafkaSession, answer: Answer, request: Any, /) -> Any:
    """Process one message of the mechanism."""
    response = schema.response(Api.SASL_AUTHENTICATE)
    conversation, token = session.sasl, bytes(request.auth_bytes)
    try:
        if conversation.mechanism != PLAIN and conversation.step is Step.AGREED:
            conversation.enter(Step.CHALLENGED)
            introduction = sasl.read_introduction(token)
            verifier = session.broker.access.verifier(introduction.name, Mechanism(conversation.mechanism))
            conversation.challenge = Challenge(introduction, verifier)
            return response(auth_bytes=conversation.challenge.text.encode())
        conversation.enter(Step.VERIFYING)
        if conversation.mechanism == PLAIN:
            words = sasl.read_words(token)
            done = partial(_verified, session, answer, b"")
            session.broker.access.log_in_with_either(words.name, words.secret, done, peer=session.output.peer)
        else:
            _prove(session, answer, token)
    except Refused as refused:
        session.end(answer)
        return response(error=refused.error, message=refused.message)
    except Busy as busy:
        # clients reconnect if the connection closes, but not after an error response
        raise PeerError(busy.message, fatal=True) from None
    return None


def _prove(session: KafkaSession, answer: Answer, token: bytes) -> None:
    """Verify a SCRAM proof against the verifier of its challenge.

    Raises Refused for an invalid message, and Busy if too many logins wait.
    """
    challenge, session.sasl.challenge = session.sasl.challenge, None
    assert challenge is not None, "a proof follows a challenge"
    messages, proof = challenge.read(token)
    done = partial(_verified, session, answer, challenge.accepted(messages))
    access, peer = session.broker.access, session.output.peer
    access.log_in_with_proof(challenge.name, challenge.verifier, messages, proof, done, peer=peer)


def _verified(session: KafkaSession, answer: Answer, last: bytes, who: Principal | BrokerError) -> None:
    """Finish a login with the user, or with the error. ``last`` is the last message of the mechanism."""
    if session.closed:
        return
    response = schema.response(Api.SASL_AUTHENTICATE)
    session.sasl.enter(Step.IDLE)
    if not isinstance(who, BrokerError):
        try:
            session.logged_in(who)
        except BrokerError as error:
            # the traceback's frames refer to this local variable, which would be a reference cycle
            who = error.with_traceback(None)
    if isinstance(who, Busy):
        session.fail(PeerError(who.message, fatal=True))
    elif isinstance(who, BrokerError):
        session.end(answer)
        answer.ok(response(error=WireError.SASL_AUTHENTICATION_FAILED, message=who.message))
    else:
        answer.ok(response(auth_bytes=last))
