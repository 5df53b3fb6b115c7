"""What goes to the connection: pieces of an answer as they are, everything else as h11 writes it."""

import h11
import pytest

from app.protocol import HEAD_BYTES, Connection


@pytest.fixture
def asked() -> Connection:
    """A connection whose request has come."""
    connection = Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(connection.next_event(), h11.Request)
    assert isinstance(connection.next_event(), h11.EndOfMessage)
    return connection


def test_a_piece_of_known_length_is_handed_on_without_a_copy(asked: Connection) -> None:
    head = asked.send(h11.Response(status_code=200, headers=[("content-length", "6")]))
    assert head == b"HTTP/1.1 200 \r\ncontent-length: 6\r\n\r\n"
    for piece in (memoryview(b"abc"), memoryview(b"def")):
        assert asked.send(h11.Data(data=piece)) is piece
    assert asked.send(h11.EndOfMessage()) == b""
    asked.start_next_cycle()


def test_a_piece_of_unknown_length_is_framed(asked: Connection) -> None:
    asked.send(h11.Response(status_code=200, headers=[]))
    assert asked.send(h11.Data(data=memoryview(b"abc"))) == b"3\r\nabc\r\n"
    assert asked.send(h11.EndOfMessage()) == b"0\r\n\r\n"


def test_more_than_was_declared_is_refused(asked: Connection) -> None:
    asked.send(h11.Response(status_code=200, headers=[("content-length", "2")]))
    with pytest.raises(h11.LocalProtocolError):
        asked.send(h11.Data(data=b"abc"))


def test_a_closed_connection_writes_nothing(asked: Connection) -> None:
    asked.send(h11.Response(status_code=200, headers=[("connection", "close"), ("content-length", "0")]))
    asked.send(h11.EndOfMessage())
    assert asked.send(h11.ConnectionClosed()) is None


def test_a_head_without_end_is_refused() -> None:
    connection = Connection(h11.SERVER, HEAD_BYTES)
    connection.receive_data(b"GET / HTTP/1.1\r\nx: " + b"a" * HEAD_BYTES)
    with pytest.raises(h11.RemoteProtocolError):
        connection.next_event()
