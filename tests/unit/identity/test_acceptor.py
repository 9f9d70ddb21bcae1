"""Which half-open connections may go on, and which go first: by sources, numbers and times, without sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fireflyer.base.errors import Busy, PermissionDenied, Unreachable, UsageError
from fireflyer.base.report_limit import REPORT_INTERVAL_NS, REPORTS
from fireflyer.base.units import SECOND
from fireflyer.identity.acceptor import (
    AcceptorEffect,
    Close,
    Find,
    HandOver,
    HandshakeAcceptor,
    HandshakeLimits,
    Refuse,
    Report,
    Send,
)
from fireflyer.identity.account import Account
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import (
    BEARER_MARK,
    Accepts,
    NodeCredential,
    Session,
    UserCredential,
    UserKey,
    token_key,
)
from fireflyer.identity.secrets import Secret

SECRET, OTHER = Secret(b"s" * 32), Secret(b"o" * 32)
TOKEN = f"{BEARER_MARK}.0123.secret"
ADA = UserKey("ada", token_key(TOKEN), Account("ada", 1001, 1001), ("fs:admin",))
_numbers = itertools.count()


def fresh(count: int) -> bytes:
    return next(_numbers).to_bytes(count, "big")


async def nobody(_token_id: str) -> UserKey | None:
    raise AssertionError("what is pure asks its owner")


def acceptor(
    limits: HandshakeLimits | None = None, full: Callable[[Session], Busy | None] | None = None
) -> HandshakeAcceptor:
    return HandshakeAcceptor(
        Accepts(SECRET, nobody), identity="hub", purpose="test", random_bytes=fresh, limits=limits, full=full
    )


def user(token: str = TOKEN) -> ClientConversation:
    return ClientConversation(UserCredential(token), purpose="test", nonce=fresh(32))


def client(secret: Secret = SECRET) -> ClientConversation:
    return ClientConversation(NodeCredential(secret, "rank 1"), purpose="test", nonce=fresh(32))


def give(to: HandshakeAcceptor, connection: int, data: bytes, piece: int = 1 << 20) -> list[AcceptorEffect]:
    """Reads all of `data` as a socket would give it, and stops when nothing is wanted any more."""
    effects: list[AcceptorEffect] = []
    while data and (count := min(piece, to.wanted(connection))):
        effects += to.received(0, connection, data[:count])
        data = data[count:]
    return effects


def heard(by: ClientConversation, data: bytes) -> bytes:
    """What the client says to it."""
    said = b""
    while data:
        count = by.wanted
        said += by.receive(data[:count])
        data = data[count:]
    return said


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_a_client_that_proves_itself_is_admitted_however_its_bytes_come(piece: int) -> None:
    server, one = acceptor(), client()
    assert server.opened(0, 7, "a") == []
    (challenge,) = give(server, 7, one.hello(), piece)
    assert isinstance(challenge, Send)
    verdict, admitted = give(server, 7, heard(one, challenge.data), piece)
    assert isinstance(verdict, Send)
    assert isinstance(admitted, HandOver)
    assert heard(one, verdict.data) == b""
    assert one.session is not None
    assert (admitted.connection, admitted.session.peer, one.session.peer) == (7, "rank 1", "hub")
    assert admitted.session.key == one.session.key
    assert (len(server), server.next_deadline_ns, server.wanted(7)) == (0, None, 0)


def test_never_a_byte_behind_the_handshake_is_asked_for() -> None:
    server, one = acceptor(), client()
    server.opened(0, 7, "a")
    (challenge,) = give(server, 7, one.hello())
    assert isinstance(challenge, Send)
    left = heard(one, challenge.data) + b"the first bytes of the collective"
    while count := min(len(left), server.wanted(7)):
        server.received(0, 7, left[:count])
        left = left[count:]
    assert left == b"the first bytes of the collective"
    with pytest.raises(UsageError, match="3 bytes were read where at most 2 were wanted"):
        client().receive(bytes(3))


def test_another_secret_is_refused_with_a_message_and_read_on_until_it_leaves() -> None:
    server, one = acceptor(), client(OTHER)
    server.opened(0, 7, "a")
    (challenge,) = give(server, 7, one.hello())
    assert isinstance(challenge, Send)
    with pytest.raises(PermissionDenied, match="another node secret"):
        heard(one, challenge.data)
    refused, report = give(server, 7, b"\x00\x2e" + bytes(46))
    assert isinstance(refused, Refuse)
    assert b"permission_denied" in refused.data
    assert isinstance(report, Report)
    assert server.received(0, 7, bytes(100)) == []
    assert server.received(0, 7, b"") == [Close(7)]


def test_a_refused_client_is_read_only_so_much_and_so_long() -> None:
    limits = HandshakeLimits(unread_bytes=5000)
    server = acceptor(limits)
    for connection in (1, 2):
        server.opened(0, connection, "a")
        server.received(0, connection, b"\xff\xff")
    assert server.received(0, 1, bytes(4000)) == []
    assert server.wanted(1) == 1000
    assert server.received(0, 1, bytes(1000)) == [Close(1)]
    assert server.next_deadline_ns == limits.refusal_ns
    assert server.expire(limits.refusal_ns - 1) == []
    assert server.expire(limits.refusal_ns) == [Close(2)]


def test_the_time_of_a_handshake_ends_however_much_it_trickles() -> None:
    server = acceptor(HandshakeLimits(handshake_ns=SECOND))
    server.opened(5, 7, "a")
    for now_ns in range(5, 5 + SECOND, SECOND // 10):
        server.received(now_ns, 7, b"\x00")
        if server.wanted(7) == 1:
            server.received(now_ns, 7, b"\xff")
    assert server.next_deadline_ns == 5 + SECOND
    refused, report = server.expire(5 + SECOND)
    assert isinstance(refused, Refuse)
    assert isinstance(report, Report)
    assert "did not authenticate within 1.0 s" in report.reason


def test_over_the_limit_of_a_source_its_oldest_goes_and_no_other() -> None:
    server = acceptor(HandshakeLimits(total=100, per_source=3))
    server.opened(0, 1, "peer")
    for connection in range(2, 5):
        assert server.opened(0, connection, "stranger") == []
    assert server.opened(0, 5, "stranger")[0] == Close(2)
    assert server.opened(0, 6, "stranger")[0] == Close(3)
    assert server.wanted(1) == 2


def test_over_the_limit_of_all_the_source_that_has_most_loses_its_oldest() -> None:
    server = acceptor(HandshakeLimits(total=6, per_source=5))
    server.opened(0, 1, "peer")
    for connection in range(2, 7):
        server.opened(0, connection, "stranger")
    assert server.opened(0, 7, "another peer")[0] == Close(2)
    assert server.opened(0, 8, "a third peer")[0] == Close(3)
    assert [server.wanted(connection) for connection in (1, 7, 8)] == [2, 2, 2]
    assert len(server) == 6


def test_a_stranger_at_each_of_many_addresses_costs_only_the_oldest() -> None:
    server = acceptor(HandshakeLimits(total=4, per_source=4))
    for connection in range(1, 5):
        server.opened(0, connection, f"stranger {connection}")
    assert server.opened(0, 5, "peer")[0] == Close(1)
    assert server.opened(0, 6, "stranger 6")[0] == Close(2)
    assert server.wanted(5) == 2


def test_a_full_server_says_so_to_those_who_have_proven_themselves_only() -> None:
    server, one = acceptor(full=lambda _session: Busy("the server is full")), client()
    server.opened(0, 7, "a")
    (challenge,) = give(server, 7, one.hello())
    assert isinstance(challenge, Send)
    refused, _ = give(server, 7, heard(one, challenge.data))
    assert isinstance(refused, Refuse)
    with pytest.raises(Busy, match="the server is full"):
        heard(one, refused.data)


def test_who_leaves_or_breaks_is_forgotten_and_named_once() -> None:
    server = acceptor()
    for connection in (1, 2):
        server.opened(0, connection, "a")
    server.received(0, 1, b"\0")
    closed, report = server.received(0, 1, b"")
    assert closed == Close(1)
    assert isinstance(report, Report)
    assert "closed the connection" in report.reason
    assert server.lost(0, 2, Unreachable("reset"))[0] == Close(2)
    assert server.lost(0, 2, Unreachable("reset")) == []
    assert len(server) == 0


def test_who_only_looks_whether_the_port_is_reached_is_not_reported() -> None:
    server = acceptor()
    server.opened(0, 1, "a")
    assert server.received(0, 1, b"") == [Close(1)]
    assert len(server) == 0


def test_reports_are_bounded_and_say_how_many_were_left_out() -> None:
    server = acceptor()

    def report_of_one(now_ns: int) -> Report | None:
        server.opened(now_ns, 1, "a")
        server.received(now_ns, 1, b"\0")
        return next((effect for effect in server.received(now_ns, 1, b"") if isinstance(effect, Report)), None)

    reports = [report_of_one(0) for _ in range(REPORTS + 30)]
    assert sum(report is not None for report in reports) == REPORTS
    later = report_of_one(REPORT_INTERVAL_NS)
    assert later is not None
    assert later.left_out == 30
    assert server.refused == REPORTS + 30 + 1


def test_a_name_that_cannot_be_sent_is_refused_when_the_acceptor_is_made() -> None:
    with pytest.raises(UsageError, match="printable"):
        HandshakeAcceptor(Accepts(SECRET), identity="a\nb", purpose="test", random_bytes=fresh)


# --- users: whose token it is, the owner finds out ---


def searching(server: HandshakeAcceptor, one: ClientConversation, connection: int = 7) -> Find:
    server.opened(0, connection, "a")
    (find,) = give(server, connection, one.hello())
    assert isinstance(find, Find)
    assert server.wanted(connection) == 0, "nothing is read meanwhile"
    return find


def test_a_user_is_admitted_when_it_was_found_whose_token_it_is() -> None:
    server, one = acceptor(), user()
    find = searching(server, one)
    assert (find.connection, find.token_id) == (7, "0123")
    (challenge,) = server.found(0, find.number, ADA)
    assert isinstance(challenge, Send)
    _, admitted = give(server, 7, heard(one, challenge.data))
    assert isinstance(admitted, HandOver)
    session = admitted.session
    assert (session.role, session.peer, session.token_id) == ("user", "ada", "0123")
    assert (session.account, session.roles, session.scope) == (ADA.account, ADA.roles, ADA.scope)
    assert server.found(0, find.number, ADA) == [], "an answer counts once"


def test_an_unknown_token_is_challenged_as_a_known_one_and_opens_nothing() -> None:
    server, one = acceptor(), user()
    find = searching(server, one)
    (challenge,) = server.found(0, find.number, None)
    assert isinstance(challenge, Send)
    with pytest.raises(PermissionDenied, match="does not accept this token"):
        heard(one, challenge.data)
    assert isinstance(give(server, 7, b"\x00\x2e" + bytes(46))[0], Refuse)


def test_where_users_cannot_be_looked_up_the_client_is_told_to_try_again_and_the_log_why() -> None:
    server, one = acceptor(), user()
    find = searching(server, one)
    refused, report = server.not_found(0, find.number, Unreachable("no manager at 10.0.0.1:9442"))
    assert isinstance(refused, Refuse)
    with pytest.raises(Busy, match="cannot be looked up at the moment; try again later"):
        heard(one, refused.data)
    assert b"10.0.0.1" not in refused.data, "a stranger is not told where the users are"
    assert report == Report("a", "no manager at 10.0.0.1:9442", 0)


def test_a_search_takes_of_the_time_that_a_client_has() -> None:
    server = acceptor(HandshakeLimits(handshake_ns=5 * SECOND))
    find = searching(server, user())
    assert server.expire(4 * SECOND) == []
    refused, _ = server.expire(5 * SECOND)
    assert isinstance(refused, Refuse)
    assert server.found(6 * SECOND, find.number, ADA) == []
    assert server.not_found(6 * SECOND, find.number, Unreachable("late")) == []


def test_the_answer_for_a_connection_that_is_gone_is_not_that_of_the_next_one_with_its_number() -> None:
    server = acceptor()
    first = searching(server, user())
    assert server.lost(0, 7, Unreachable("it broke"))[0] == Close(7)
    second = searching(server, user(f"{BEARER_MARK}.4567.x"))
    assert server.found(0, first.number, ADA) == []
    (challenge,) = server.found(0, second.number, None)
    assert isinstance(challenge, Send)
