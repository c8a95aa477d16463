"""Logins: SaslHandshake and SaslAuthenticate with PLAIN and SCRAM (spec: kafka#sasl).

A failed login gets an error response, then the connection is closed. The response is the same for an unknown user and a
wrong password.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from polywire.broker.access import Principal
from polywire.broker.scram import Mechanism
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, PeerError
from polywire.protocols.kafka import sasl, schema
from polywire.protocols.kafka.messages import Api, Refused, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.sasl import OAUTHBEARER, PLAIN, Challenge, Step
from polywire.protocols.kafka.session import KafkaSession

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        SaslAuthenticateRequest,
        SaslAuthenticateResponse,
        SaslHandshakeRequest,
        SaslHandshakeResponse,
    )


def sasl_handshake(session: KafkaSession, answer: Answer, request: SaslHandshakeRequest, /) -> SaslHandshakeResponse:
    response = schema.response(Api.SASL_HANDSHAKE)
    conversation = session.sasl
    error = WireError.NONE
    try:
        conversation.enter(Step.AGREED)
    except Refused as refused:
        error = refused.error
    mechanisms = [*sasl.MECHANISMS, *([OAUTHBEARER] if session.broker.access.id_tokens else [])]
    if request.mechanism not in mechanisms:
        error = WireError.UNSUPPORTED_SASL_MECHANISM
    if error is not WireError.NONE:
        session.end(answer)
    conversation.mechanism = request.mechanism
    conversation.is_bare = answer.request.version < sasl.BARE_SINCE
    return response(error=error, mechanisms=mechanisms)


def sasl_authenticate(
    session: KafkaSession, answer: Answer, request: SaslAuthenticateRequest, /
) -> SaslAuthenticateResponse | None:
    """SaslAuthenticate: process the client's next message of the SASL mechanism."""
    response = schema.response(Api.SASL_AUTHENTICATE)
    conversation, token = session.sasl, bytes(request.auth_bytes)
    try:
        if conversation.mechanism not in (PLAIN, OAUTHBEARER) and conversation.step is Step.AGREED:
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
        elif conversation.mechanism == OAUTHBEARER:
            _verified(session, answer, b"", _bearer(session, token))
        else:
            _prove(session, answer, token)
    except Refused as refused:
        session.end(answer)
        return response(error=refused.error, message=refused.message)
    except Busy as busy:
        # clients reconnect if the connection closes, but not after an error response
        raise PeerError(busy.message, fatal=True) from None
    return None


def _bearer(session: KafkaSession, token: bytes) -> Principal | BrokerError:
    """Log in with a provider's token. Raises Refused for an invalid message."""
    words = sasl.read_bearer(token)
    try:
        principal = session.broker.access.log_in_with_token(words.secret, peer=session.output.peer)
    except Denied as denied:
        return denied.with_traceback(None)
    if words.name not in ("", principal.name):
        return Denied(ErrorCode.LOGIN_FAILED, "the token is for another user")
    return principal


def _prove(session: KafkaSession, answer: Answer, token: bytes) -> None:
    """Verify the client's SCRAM proof, which answers the challenge sent before.

    Raises Refused for an invalid message, and Busy if too many logins wait.
    """
    challenge, session.sasl.challenge = session.sasl.challenge, None
    assert challenge is not None, "a proof follows a challenge"
    messages, proof = challenge.read(token)
    done = partial(_verified, session, answer, challenge.accepted(messages))
    access, peer = session.broker.access, session.output.peer
    access.log_in_with_proof(challenge.name, challenge.verifier, messages, proof, done, peer=peer)


def _verified(session: KafkaSession, answer: Answer, last: bytes, principal: Principal | BrokerError) -> None:
    """Respond to a login.

    ``principal`` is the user, or the error. ``last`` is the last message that SCRAM sends to the client.
    """
    if session.closed:
        return
    response = schema.response(Api.SASL_AUTHENTICATE)
    session.sasl.enter(Step.IDLE)
    if not isinstance(principal, BrokerError):
        try:
            session.logged_in(principal)
        except BrokerError as error:
            # the traceback's frames refer to this local variable, which would be a reference cycle
            principal = error.with_traceback(None)
    if isinstance(principal, Busy):
        session.fail(PeerError(principal.message, fatal=True))
    elif isinstance(principal, BrokerError):
        session.end(answer)
        answer.ok(response(error=WireError.SASL_AUTHENTICATION_FAILED, message=principal.message))
    else:
        answer.ok(response(auth_bytes=last, session_lifetime_ms=_lifetime_ms(session, principal)))


def _lifetime_ms(session: KafkaSession, principal: Principal) -> int:
    """Return after how many milliseconds the client must log in again (KIP-368); 0 for never.

    Only tokens of a provider are renewed. The connection of an access token is closed when the token expires.
    """
    if principal.token is not None or principal.expires_at_us is None:
        return 0
    return max((principal.expires_at_us - session.broker.clock.now_us()) // 1000, 1)
