"""`decode_data_uri`: every accepted way of writing bytes down gives them back; all else is refused (rows M13-M15)."""

import base64
import binascii
import sys
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data_uri import decode_data_uri
from app.errors import InvalidRequest, LimitExceeded

PNG = bytes.fromhex("89504e470d0a1a0a") + bytes(range(256)) + b"\xfb\xff\xfe"
B64 = base64.b64encode(PNG).decode()
LIMIT = 1_000_000


@pytest.mark.parametrize(
    "header",
    [
        "data:image/png;base64",
        "DATA:image/png;BASE64",
        "data:image/jpeg;charset=utf-8;base64",
        "data:image/png;base64;name=a.png",
        "data:image/png;name=a%20b.png; base64",
        "data:application/json;base64",
        "data:;base64",
        "data:nonsense;base64",
    ],
)
def test_scheme_type_and_parameters_do_not_matter(header: str) -> None:
    assert decode_data_uri(f"{header},{B64}", LIMIT) == PNG


def test_written_without_base64() -> None:
    assert decode_data_uri("data:image/png," + quote(PNG), LIMIT) == PNG
    assert decode_data_uri("data:,a+b /c%2525", LIMIT) == b"a+b /c%25"


def _lines(text: str, width: int, line_break: str) -> str:
    return line_break.join(text[start : start + width] for start in range(0, len(text), width))


def _escape_all(text: str) -> str:
    return "".join(f"%{ord(character):02x}" for character in text)


FORMS = {
    "plain": lambda text: text,
    "no padding": lambda text: text.rstrip("="),
    "url-safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "escaped": lambda text: quote(text, safe=""),
    "all escaped": _escape_all,
    "mime": lambda text: _lines(text, 76, "\r\n"),
    "odd lines": lambda text: _lines(text, 7, "\n"),
    "folded": lambda text: "\n" + _lines(text, 13, " \r\n\t") + "\r\n",
    "blanks between groups": lambda text: f" {_lines(text, 8, ' ')}\t",
    "escaped lines": lambda text: quote(_lines(text, 64, "\r\n")),
}


@given(data=st.binary(min_size=1, max_size=400), form=st.sampled_from(sorted(FORMS)))
def test_any_bytes_come_back_from_every_form(data: bytes, form: str) -> None:
    text = FORMS[form](base64.b64encode(data).decode())
    assert decode_data_uri("data:;base64," + text, LIMIT) == data


@given(data=st.binary(min_size=1, max_size=400))
def test_any_bytes_come_back_percent_escaped(data: bytes) -> None:
    assert decode_data_uri("data:," + quote(data), LIMIT) == data


def test_escapes_across_the_steps_of_the_decoder() -> None:
    for shift in range(4):
        data = b"x" * shift + b"\x01\xff" * 200_000
        assert decode_data_uri("data:," + quote(data), LIMIT) == data


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("data:image/png", "expected data:"),
        ("data:image/png;base64", "expected data:"),
        ("image/png;base64,AAAA", "expected data:"),
        ("https://example.test/a,b", "expected data:"),
        ("", "expected data:"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png,", "no data"),
        ("data:;base64, \r\n", "no data"),
        ("data:;base64,====", "'='"),
        ("data:;base64,AAAA!!AAAA", "not base64"),
        ("data:;base64,AAA!", "not base64"),
        ("data:;base64,AAAA#AAA", "not base64"),
        ("data:;base64,AA=AAAA=", "not base64"),
        ("data:;base64,AAAA\x0bAAA", "not base64"),
        ("data:;base64,AAAA AAA\x0c", "not base64"),
        ("data:;base64,AAAA%00%00%00%00", "not base64"),
        ("data:;base64,AAAA%2541AAA", "not base64"),
        ("data:;base64,AAAAäAAA", "ASCII"),
        ("data:;base64,AAAA\ud800AAA", "ASCII"),
        ("data:;base64,AAAAA", "cut"),
        ("data:;base64,AAAAA===", "cut"),
        ("data:;base64,AAAAQR", "unused bits"),
        ("data:;base64,AAAAQUJ=", "unused bits"),
        ("data:;base64,AAAA=", "'='"),
        ("data:;base64,QQ===", "'='"),
        ("data:;base64,+_AA", "alphabets"),
        ("data:;base64,AA AAAAAA", "blank within"),
        ("data:;base64,AAAA%4", "escape"),
        ("data:;base64,AAAA%", "escape"),
        ("data:;base64,AA%zzAA", "hexadecimal"),
        ("data:,%4%41", "hexadecimal"),
        ("data:,ab#cd", "percent-escaped"),
        ("data:,ab\ncd", "percent-escaped"),
    ],
)
def test_anything_else_is_refused(uri: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_data_uri(uri, LIMIT)


def test_a_form_decoded_plus_never_gives_other_bytes() -> None:
    text = base64.b64encode(bytes(range(256))).decode()
    assert text.count("+") == 6
    with pytest.raises(InvalidRequest, match="blank within"):
        decode_data_uri("data:;base64," + text.replace("+", " "), LIMIT)


@given(data=st.binary(min_size=3, max_size=60), cut=st.integers(1, 3))
def test_a_cut_uri_gives_a_prefix_or_an_error(data: bytes, cut: int) -> None:
    text = base64.b64encode(data).decode().rstrip("=")[:-cut]
    try:
        decoded = decode_data_uri("data:;base64," + text, LIMIT)
    except InvalidRequest:
        return
    assert data.startswith(decoded)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_limit_counts_decoded_bytes(form: str) -> None:
    uri = "data:;base64," + FORMS[form](B64)
    assert decode_data_uri(uri, len(PNG)) == PNG
    with pytest.raises(LimitExceeded, match=f"{len(PNG)} bytes, limit {len(PNG) - 1}"):
        decode_data_uri(uri, len(PNG) - 1)


def test_limit_of_the_escaped_form() -> None:
    assert decode_data_uri("data:," + quote(PNG), len(PNG)) == PNG
    with pytest.raises(LimitExceeded):
        decode_data_uri("data:," + quote(PNG), len(PNG) - 1)


def test_a_gap_across_the_steps_of_the_decoder() -> None:
    """Steps end at multiples of 64 KiB behind the comma: within groups, within blanks, within line breaks."""
    step = 1 << 16
    for before in range(step - 5, step + 5):
        whole = "A" * (before // 4 * 4)
        for gap in (" ", " " * 9, "\t \r\n \t", "\r\n", " " * 2 * step + "\n", " " * 2 * step):
            data = decode_data_uri(f"data:;base64,{whole}{gap}QUJD", LIMIT)
            assert data == bytes(len(whole) // 4 * 3) + b"ABC"
        assert decode_data_uri(f"data:;base64,{'A' * before} \n {'A' * (-before % 4)}QUJD", LIMIT)[-3:] == b"ABC"
        if before % 4:
            with pytest.raises(InvalidRequest, match="blank within"):
                decode_data_uri(f"data:;base64,{'A' * before} {'A' * (-before % 4)}QUJD", LIMIT)
        assert decode_data_uri(f"data:;base64,{whole}QQ==", LIMIT) == bytes(len(whole) // 4 * 3) + b"A"
        assert decode_data_uri(f"data:;base64,{whole}%2B/A%3d%20", LIMIT)[-2:] == b"\xfb\xf0"
        with pytest.raises(InvalidRequest, match="not base64"):
            decode_data_uri(f"data:;base64,{whole}QQ==QQ==", LIMIT)
    with pytest.raises(InvalidRequest, match="alphabets"):
        decode_data_uri(f"data:;base64,+AAA{'A' * step}_AAA", LIMIT)


@pytest.mark.parametrize(
    "uri",
    [
        "data:;base64," + "AAAA\r\n " * 6_000_000,
        "data:;base64," + "AAAA" * 10_000_000,
        "data:;base64," + "%41" * 14_000_000,
        "data:," + "%41" * 14_000_000,
    ],
    ids=["lines and blanks", "plain", "escaped", "escaped bytes"],
)
def test_no_call_holds_the_interpreter_for_long(uri: str) -> None:
    """A whole pass over these 40 MB takes 30 ms and more; CPU time, so that a busy machine is no matter."""
    before = time.thread_time()
    longest = 0.0

    def watch(*_: object) -> None:
        nonlocal before, longest
        now = time.thread_time()
        longest = max(longest, now - before)
        before = now

    sys.setprofile(watch)
    try:
        data = decode_data_uri(uri, 1 << 26)
    finally:
        sys.setprofile(None)
    assert len(data) >= 10_000_000
    assert longest < 0.02


def test_costs_little_more_than_the_base64_decoder() -> None:
    text = base64.b64encode(bytes(range(256)) * 24_000).decode()

    def fastest(call) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    plain = fastest(lambda: binascii.a2b_base64(text))
    # 1.5 times on an idle machine; a loop over characters would be 50 times.
    assert fastest(lambda: decode_data_uri("data:image/png;base64," + text, 10_000_000)) < 6 * plain
