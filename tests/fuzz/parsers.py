"""Everything that reads bytes of a request before any decoder does, each with what it may raise."""

import contextlib
import struct
from collections.abc import Callable

from app.data_uri import decode_data_uri
from app.decode.jpeg_end import load_without_end
from app.decode.sniff import identify
from app.errors import FetchDenied, FetchFailed, InvalidRequest
from app.forms import split_form
from app.intake import Item, Job, parse
from app.url import parse_url
from encoder import InputError

MAX_ITEMS = 8
JSON_TYPE = {"content-type": "application/json"}
FORM_TYPE = {"content-type": "multipart/form-data; boundary=cut"}


def json_body(data: bytes) -> None:
    with contextlib.suppress(InputError):
        check_job(parse(JSON_TYPE, "", [], data, MAX_ITEMS))


def form_body(data: bytes) -> None:
    with contextlib.suppress(InputError):
        check_job(parse(FORM_TYPE, "", [], data, MAX_ITEMS))


def form_with_its_boundary(data: bytes) -> None:
    boundary, _, body = data.partition(b"\n")
    with contextlib.suppress(InputError):
        split_form("multipart/form-data; boundary=" + boundary.decode("latin-1"), body, MAX_ITEMS)


def data_uri(data: bytes) -> None:
    text = data.decode("utf-8", errors="surrogateescape")
    for uri in (text, "data:," + text, "data:image/png;base64," + text):
        with contextlib.suppress(InputError):
            decoded = decode_data_uri(uri, 10_000)
            assert 0 < len(decoded) <= 10_000


def url(data: bytes) -> None:
    text = data.decode("utf-8", errors="surrogatepass") if data.isascii() else data.decode("utf-8", errors="replace")
    for whole in (text, "http://" + text, "https://[" + text):
        with contextlib.suppress(InvalidRequest, FetchDenied):
            parsed = parse_url(whole)
            assert parsed.target.isascii()
            assert parsed.host.isascii()
            assert not set(parsed.host) & set("/\\@?# \r\n%")
    with contextlib.suppress(FetchFailed, FetchDenied):
        parse_url("https://media.test/a/b?c").follow(text)


def content_type(data: bytes) -> None:
    head, _, accept = data.decode("latin-1").partition("\n")
    with contextlib.suppress(InputError):
        parse({"content-type": head}, accept, [("dtype", accept)], b"x", MAX_ITEMS)


def query(data: bytes) -> None:
    parts = data.decode("utf-8", errors="replace").split("&")
    pairs = [(name, value) for name, _, value in (part.partition("=") for part in parts)]
    with contextlib.suppress(InputError):
        check_job(parse({"content-type": "image/png"}, "", pairs, b"x", MAX_ITEMS))


def media_head(data: bytes) -> None:
    for kind in (None, "image", "video"):
        with contextlib.suppress(InputError):
            identify(data, kind)  # type: ignore[arg-type]


def jpeg_end(data: bytes) -> None:
    # Whatever it raises is caught by its one caller; what counts is that it comes back.
    with contextlib.suppress(ValueError, OSError, IndexError, KeyError, struct.error, SyntaxError, TypeError, EOFError):
        load_without_end(b"\xff\xd8" + data)


def check_job(job: Job) -> None:
    assert 1 <= len(job.items) <= MAX_ITEMS
    assert all(isinstance(item, Item) for item in job.items)


PARSERS: dict[str, Callable[[bytes], None]] = {
    parser.__name__: parser
    for parser in (
        json_body,
        form_body,
        form_with_its_boundary,
        data_uri,
        url,
        content_type,
        query,
        media_head,
        jpeg_end,
    )
}

# What a fuzzer starts from.
SEEDS: dict[str, list[bytes]] = {
    "json_body": [
        b'{"input": ["data:image/png;base64,AAAA"], "dtype": "float32"}',
        b'{"input": [{"type": "image_url", "image_url": {"url": "https://a.test/b"}, "uuid": "x"}]}',
        b'{"input": {"type": "video_url", "video_url": "http://a", "fps": 2.0, "max_frames": 4}, "on_error": "fail"}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", '
        b'"image_url": "data:,x"}]}], "model": "kimi-k3", "encoding_format": "float", "deadline_ms": 5}',
    ],
    "form_body": [
        b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nx'
        b'\r\n--cut\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"dtype": "float32"}\r\n--cut--\r\n',
        b"--cut\r\nContent-Disposition: form-data; name=image_url\r\n\r\nhttp://a\r\n--cut--",
        b"preamble\r\n--cut\r\nContent-Disposition: form-data; name=f; filename*=UTF-8''%e2\r\n\r\n\r\n--cut--\r\nend",
    ],
    "form_with_its_boundary": [b'"a b"\n--a b\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n--a b--'],
    "data_uri": [
        b"data:image/png;base64,iVBORw0KGgo=",
        b"data:,a%20b",
        b"data:x;charset=utf-8;BASE64,AA-_\r\n AA%3D%3D",
    ],
    "url": [
        b"media.test:80/a?b#c",
        b"[::1]:8080/",
        b"0x7f.1/",
        "bücher.test/ä".encode(),
        b"//other/..//./x",
        b"http://a@b/",
    ],
    "content_type": [
        b'multipart/form-data; boundary="x"\nfloat32',
        b"application/json; charset=utf-8\napplication/x-ndjson",
    ],
    "query": [
        b"dtype=float32&fps=2.0&max_frames=3&uuid=x",
        b"encoding_format=safetensors&deadline_ms=1&allow_partial=true",
    ],
    "media_head": [
        b"\x89PNG\r\n\x1a\n",
        b"\0\0\0\x18ftypmp42",
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"\x1a\x45\xdf\xa3",
        b"GIF89a",
        b"FLV\1",
    ],
    "jpeg_end": [
        b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xdb\0\x43\0"
        + bytes(64)
        + b"\xff\xc0\0\x0b\x08\0\x08\0\x08\1\1\x11\0"
    ],
}
