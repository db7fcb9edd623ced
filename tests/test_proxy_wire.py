"""Answers of upstreams as bytes: whatever way they are cut, and whatever is wrong with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import UpstreamError
from proxy.pool import target
from proxy.wire import Chunked, read_head


def test_a_head_says_where_its_body_ends() -> None:
    head = read_head(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length:  12 ")
    assert (head.status, head.length, head.chunked, head.keep) == (200, 12, False, True)
    assert head.headers["content-type"] == "application/json"
    head = read_head(b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked")
    assert (head.length, head.chunked, head.keep) == (None, True, True)
    head = read_head(b"HTTP/1.1 503 Busy now\r\nConnection: close\r\nContent-Length: 0")
    assert (head.status, head.length, head.keep) == (503, 0, False)
    assert read_head(b"HTTP/1.1 204 No Content").length == 0
    head = read_head(b"HTTP/1.0 200 OK")
    assert (head.length, head.chunked, head.keep) == (None, False, False)


def test_a_body_that_ends_in_two_ways_is_the_last_one_on_its_connection() -> None:
    head = read_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3")
    assert (head.length, head.chunked, head.keep) == (None, True, False)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"SSH-2.0-OpenSSH",
        b"HTTP/2 200",
        b"HTTP/1.1 abc",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n folded: x",
        b"HTTP/1.1 200 OK\r\nname : x",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip",
    ],
)
def test_a_head_that_is_none_is_refused(head: bytes) -> None:
    with pytest.raises(UpstreamError):
        read_head(head)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=40))
def test_chunks_come_out_whole_however_they_are_cut(pieces: list[bytes], cuts: list[int]) -> None:
    body = b"".join(b"%X;x=y\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    wire = body + b"0\r\nTrailer: 1\r\n\r\nrest"
    chunked, found, at = Chunked(), b"", 0
    for size in [*cuts, len(wire)]:
        if chunked.done:
            break
        found += b"".join(chunked.feed(wire[at : at + size]))
        at += size
    assert chunked.done
    assert found == b"".join(pieces)
    assert chunked.rest + wire[at:] == b"rest"


def bytewise(wire: bytes) -> None:
    chunked = Chunked()
    for at in range(len(wire)):
        chunked.feed(wire[at : at + 1])


@pytest.mark.parametrize(
    "wire",
    [b"x\r\n", b"\r\n\r\n", b"-1\r\n", b"5\r\nhello!!", b"5\r\nhello\n\r", b"1" * 5000, b"0x5\r\nhello\r\n"],
)
def test_what_is_no_chunk_is_refused(wire: bytes) -> None:
    with pytest.raises(UpstreamError):
        Chunked().feed(wire)
    with pytest.raises(UpstreamError):
        bytewise(wire)


def test_urls_are_taken_apart() -> None:
    found = target("http://[::1]:8100/v1/chat/completions?a=b")
    assert (found.origin, found.host, found.path) == (
        ("::1", 8100, False),
        "[::1]:8100",
        "/v1/chat/completions?a=b",
    )
    assert target("https://user:pw@api.example.com").origin == ("api.example.com", 443, True)
    assert target("https://user:pw@api.example.com").host == "api.example.com"
    for url in ("ftp://x/", "http:///x", "http://x:port/", "http://x/a b", "x", "http://x/\r\nHost: y"):
        with pytest.raises(UpstreamError):
            target(url)
