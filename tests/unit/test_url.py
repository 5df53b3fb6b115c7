"""`parse_url` and redirects: one parser, strict about everything before the path, faithful to everything after."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import FetchDenied, FetchFailed, InvalidRequest
from app.url import MediaUrl, parse_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://media.test/a.png", ("https", "media.test", 443, "/a.png")),
        ("HTTP://Media.TEST:8080/A?b=C", ("http", "media.test", 8080, "/A?b=C")),
        ("http://media.test", ("http", "media.test", 80, "/")),
        ("http://media.test.:80?x", ("http", "media.test", 80, "/?x")),
        ("http://media.test:/a#part", ("http", "media.test", 80, "/a")),
        ("http://media.test#@evil.test/", ("http", "media.test", 80, "/")),
        ("http://media.test/@x:y//..;?a=/../%2e", ("http", "media.test", 80, "/@x:y//..;?a=/../%2e")),
        ("http://media.test/a%3Ab%3a%zz?", ("http", "media.test", 80, "/a%3Ab%3a%zz?")),
        ("http://media.test/ü b", ("http", "media.test", 80, "/%C3%BC%20b")),
        ("http://bücher.test/", ("http", "xn--bcher-kva.test", 80, "/")),
        ("http://127。0。0。1/", ("http", "127.0.0.1", 80, "/")),  # ideographic full stops
        ("http://[::FFFF:127.0.0.1]:81/", ("http", "::ffff:7f00:1", 81, "/")),
    ],
)
def test_parts(url: str, parts: tuple[str, str, int, str]) -> None:
    assert parse_url(url) == MediaUrl(*parts)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.png",
        "/etc/passwd",
        "//media.test/a",
        " https://media.test/",
        "https:",
        "https:media.test/a",
        "https:/media.test/a",
        "https:///a",
        "https://",
        "https://:80/",
        "https://.",
        "http://media..test/",
        "http://good@127.0.0.1/",
        "http://good:word@media.test/",
        "http://@media.test/",
        "http://media.test\\@evil.test/",
        "http:\\\\media.test/",
        "http://media.test/a\\b",
        "http://media.test/a\r\nHost: evil.test",
        "http://media.test/a\tb",
        "http://media.test/\x7f",
        "http://media .test/",
        "http://%31%32%37.0.0.1/",
        "http://media.test:0/",
        "http://media.test:65536/",
        "http://media.test:\uff18\uff10/",
        "http://media.test:-1/",
        "http://media.test:80:80/",
        "http://[::1/",
        "http://::1/",
        "http://[::1]x/",
        "http://[127.0.0.1]/",
        "http://[v1.a]/",
        "http://media.test/\ud800",
        "http://media\u2044evil.test/",
        "http://" + "a" * 64 + ".test/",
        "http://" + "ü" * 300 + ".test/",
        "http://media.test/" + "a" * 16_384,
    ],
)
def test_forms_that_are_no_url(url: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "ftp://media.test/",
        "gopher://x",
        "data:,a",
        "javascript:x",
        "C:\\a.png",
    ],
)
def test_other_schemes_are_denied(url: str) -> None:
    with pytest.raises(FetchDenied, match="scheme"):
        parse_url(url)


def test_a_zone_is_denied() -> None:
    with pytest.raises(FetchDenied, match="zone"):
        parse_url("http://[fe80::1%eth0]/")


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#\\"), max_size=80))
def test_printable_targets_stay_byte_for_byte(rest: str) -> None:
    assert parse_url("https://media.test/" + rest).target == "/" + rest
    assert parse_url("https://media.test/").follow("/" + rest.lstrip("/")).target == "/" + rest.lstrip("/")


@given(st.text(max_size=60))
def test_no_text_ends_in_another_error(text: str) -> None:
    for url in (text, "http://" + text):
        with contextlib.suppress(InvalidRequest, FetchDenied):
            assert parse_url(url).scheme in ("http", "https")


def test_authority_names_the_port_unless_it_is_the_default() -> None:
    assert parse_url("https://media.test:443/").authority == "media.test"
    assert parse_url("https://media.test:80/").authority == "media.test:80"
    assert parse_url("http://[::1]:8080/").authority == "[::1]:8080"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "[::1]"])
def test_label_is_never_an_address(host: str) -> None:
    assert parse_url(f"http://{host}/").label == "the media host"
    assert parse_url("http://0x7f.media.test/").label == "0x7f.media.test"


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("c.png", "/a/c.png"),
        ("./c.png?d=%3A#e", "/a/c.png?d=%3A"),
        ("../c.png", "/c.png"),
        ("../../../c.png", "/c.png"),
        ("c/../d/.", "/a/d/"),
        ("..", "/"),
        ("c//d?../e", "/a/c//d?../e"),
        ("?q=../%2E", "/a/b?q=../%2E"),
        ("/c/../d?e=%3A%2f", "/c/../d?e=%3A%2f"),
        ("//other.test/d", "/d"),
        ("http://other.test/%3A", "/%3A"),
    ],
)
def test_redirects(location: str, target: str) -> None:
    assert parse_url("http://media.test:81/a/b?x=/y/z").follow(location).target == target


def test_redirect_keeps_or_changes_the_host() -> None:
    base = parse_url("https://media.test:81/a")
    assert base.follow("b").authority == "media.test:81"
    assert base.follow("//other.test/b") == MediaUrl("https", "other.test", 443, "/b")


@pytest.mark.parametrize("location", ["http:b", "https://", "http://a@b/", "/a\\b", "https://media.test:0/"])
def test_redirects_to_no_url_are_the_upstreams_fault(location: str) -> None:
    with pytest.raises(FetchFailed, match=r"media\.test redirects"):
        parse_url("https://media.test/").follow(location)


@pytest.mark.parametrize("location", ["http://media.test/", "file:///etc/passwd", "data:,x"])
def test_redirects_to_less_than_https_are_denied(location: str) -> None:
    with pytest.raises(FetchDenied):
        parse_url("https://media.test/").follow(location)
