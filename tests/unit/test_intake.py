"""The three request forms have one meaning, and everything that is not the contract's is refused by name."""

import asyncio
from collections.abc import AsyncIterator

import orjson
import pytest

from app.budget import ByteBudget, Hold
from app.errors import ClientTooSlow, InvalidRequest, LimitExceeded, Overloaded, UnsupportedMedia
from app.intake import Job, parse, read_body

BOUNDARY = "frontier"


def parse_json(document: object, accept: str = "") -> Job:
    return parse({"content-type": "application/json"}, accept, [], orjson.dumps(document), 64)


def form(*parts: tuple[str, bytes]) -> bytes:
    """Parts given as (header lines, data)."""
    body = b"".join(b"--frontier\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts)
    return body + b"--frontier--\r\n"


def parse_form(*parts: tuple[str, bytes], max_items: int = 64) -> Job:
    return parse({"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, "", [], form(*parts), max_items)


FILE = 'Content-Disposition: form-data; name="file"; filename="a.png"'


def test_parts_messages_and_bare_strings_say_the_same() -> None:
    url = "https://media.example/a.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    for document in (
        {"input": [part]},
        {"input": part},
        {"input": [url]},
        {"input": url},
        {"input": [{"type": "image_url", "image_url": url}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [part], "name": "x"}]},
    ):
        (item,) = parse_json(document).items
        assert (item.kind, item.source, item.uuid) == ("image", url, None)


def test_options_of_a_part_win_over_those_of_the_request() -> None:
    job = parse_json(
        {
            "fps": 2,
            "allow_partial": True,
            "apply_exif_orientation": True,
            "input": [
                {"type": "video_url", "video_url": "https://a/1", "fps": 0.5, "max_frames": 8, "uuid": "mine"},
                {"type": "video_url", "video_url": "https://a/2", "allow_partial": False},
                {"type": "image_url", "image_url": "https://a/3", "apply_exif_orientation": False},
            ],
        }
    )
    first, second, third = (item.options for item in job.items)
    assert (first.fps, first.max_frames, first.allow_partial) == (0.5, 8, True)
    assert (second.fps, second.max_frames, second.allow_partial) == (2.0, None, False)
    assert (third.apply_exif_orientation, second.apply_exif_orientation) == (False, True)
    assert job.items[0].uuid == "mine"


def test_every_form_of_a_request_can_say_its_priority() -> None:
    part = ('Content-Disposition: form-data; name="request"', b'{"priority": "batch"}')
    query = [("priority", "batch")]
    jobs = [
        parse_json({"input": ["https://a/b"], "priority": "batch"}),
        parse_form((FILE, b"x"), part),
        parse({"content-type": "image/png"}, "", query, b"x", 64),
    ]
    assert [job.options.priority for job in jobs] == ["batch"] * 3
    assert parse_json({"input": ["https://a/b"]}).options.priority == "interactive"
    for wrong in (b'{"priority": "low"}', b'{"priority": ["batch"]}'):
        with pytest.raises(InvalidRequest, match="request: priority: Input should be 'interactive' or 'batch'"):
            parse_form((FILE, b"x"), (part[0], wrong))
    with pytest.raises(InvalidRequest, match="priority: Input should be 'interactive' or 'batch'"):
        parse({"content-type": "image/png"}, "", [("priority", "")], b"x", 64)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "request body must be a JSON object"),
        ({}, "exactly one of input and messages"),
        ({"input": ["https://a/b"], "messages": [{"content": "x"}]}, "exactly one of input and messages"),
        ({"input": []}, "input: "),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages: no image_url or video_url part"),
        ({"input": ["https://a/b"], "inputs": 1}, "inputs: unknown field"),
        ({"input": [{"type": "image_url", "image_url": "https://a/b", "fps": 1}]}, "input[0].fps: unknown field"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x", "d": 1}}]}, "input[0].image_url.d: unknown field"),
        (
            {"input": [{"type": "video_url", "video_url": "x", "fps": "2"}]},
            "input[0].fps: Input should be a valid number",
        ),
        (
            {"input": [{"type": "video_url", "video_url": "x", "fps": 0}]},
            "input[0].fps: Input should be greater than 0",
        ),
        ({"input": [{"type": "video_url", "video_url": "x", "max_frames": 1.5}]}, "input[0].max_frames: "),
        ({"input": [{"type": "video_url"}]}, "input[0].video_url: required"),
        ({"input": [{"type": "audio_url"}]}, "input[0]: must be an object with a type, image_url or video_url"),
        ({"input": [{"url": "x"}]}, "input[0]: must be an object with a type, image_url or video_url"),
        ({"input": [5]}, "input[0]: must be an object with a type, image_url or video_url"),
        ({"input": [{"type": "image_url", "image_url": 7}]}, "input[0].image_url: must be an object"),
        (
            {"messages": [{"content": [{"type": "image_url", "image_url": "x", "detail": "low"}]}]},
            "messages[0].content[0].detail: unknown field",
        ),
        ({"messages": [{"content": [{"type": "audio_url"}]}]}, "messages[0].content[0]: must be an object with a type"),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url: required"),
        ({"messages": [{"content": 5}]}, "messages[0].content: "),
        ({"messages": ["hello"]}, "messages[0]: must be an object"),
        ({"input": ["x"], "": 1}, "'': unknown field"),
        ({"input": ["x"], "a\nb": 1}, "'a\\nb': unknown field"),
        ({"input": [{"type": "image_url", "image_url": ""}]}, "input[0].image_url.url: "),
        ({"input": ["x"], "delivery": "reference"}, "delivery: Input should be 'inline'"),
        ({"input": ["x"], "encoding_format": "bytes"}, "encoding_format: Input should be 'base64'"),
        ({"input": ["x"], "dtype": "int8"}, "dtype: Input should be 'bfloat16'"),
        ({"input": ["x"], "on_error": "ignore"}, "on_error: Input should be 'partial' or 'fail'"),
        ({"input": ["x"], "deadline_ms": 0}, "deadline_ms: Input should be greater than or equal to 1"),
        ({"input": ["x"], "priority": "urgent"}, "priority: Input should be 'interactive' or 'batch'"),
        ({"input": ["x"], "priority": None}, "priority: Input should be 'interactive' or 'batch'"),
        ({"input": ["x"], "priority": 1}, "priority: Input should be 'interactive' or 'batch'"),
        ({"input": ["x"], "model": 7}, "model: Input should be a valid string"),
        ({"input": "x", "messages": None, "uuid": "u"}, "uuid: unknown field"),
    ],
)
def test_a_wrong_document_is_refused_with_the_field_named(document: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_json(document)
    assert message in str(refusal.value)
    assert "pydantic" not in str(refusal.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"{'input': 1}", b"NaN"])
def test_a_body_that_is_not_json_is_refused_with_its_place(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"request body (is not JSON \(line \d+, column \d+\)|must be)"):
        parse({"content-type": "application/json"}, "", [], body, 64)


def test_too_many_items_are_counted_before_they_are_looked_at() -> None:
    with pytest.raises(LimitExceeded, match="input: 65 items, limit 64"):
        parse_json({"input": [{"nonsense": 1}] * 65})
    parts = [{"type": "image_url", "image_url": "x"}] * 33
    with pytest.raises(LimitExceeded, match="messages: 66 media parts, limit 64"):
        parse_json({"messages": [{"role": "user", "content": parts}, {"role": "user", "content": parts}]})
    with pytest.raises(LimitExceeded, match="form: more than"):
        parse_form(*[(FILE, b"x")] * 3, max_items=2)


def test_every_file_part_is_an_item_in_order() -> None:
    job = parse_form(
        (FILE + "\r\nContent-Type: image/png", b"first\r\n--frontie"),
        ('Content-Disposition: form-data; name="request"\r\nContent-Type: application/json', b'{"dtype":"float32"}'),
        ('Content-Disposition: form-data; name="clip"; filename="b"\r\nContent-Type: video/mp4', b"\x00second"),
        ('Content-Disposition: form-data; name="third"; filename="c"', b""),
        ('Content-Disposition: form-data; name="image_url"', b"data:image/png;base64,AAAA"),
    )
    assert [(item.kind, item.source) for item in job.items] == [
        ("image", b"first\r\n--frontie"),
        ("video", b"\x00second"),
        (None, b""),
        ("image", "data:image/png;base64,AAAA"),
    ]
    assert job.options.dtype == "float32"


def test_a_form_field_of_megabytes_is_data_like_any_other() -> None:  # M21
    url = b"data:image/png;base64," + b"A" * 2_000_000
    job = parse_form(
        ('Content-Disposition: form-data; name="image_url"', url),
        (FILE, b"\x89" * 20_000_000),
    )
    assert job.items[0].source == url.decode()
    assert len(job.items[1].source) == 20_000_000


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([('Content-Disposition: form-data; name="request"', b"{}")], "form has no file part"),
        ([('Content-Disposition: form-data; name="request"', b"{")], "form part request is not JSON"),
        ([('Content-Disposition: form-data; name="request"', b"3")], "request: must be an object"),
        ([('Content-Disposition: form-data; name="request"', b'{"input":[]}')], "request: input: unknown field"),
        ([('Content-Disposition: form-data; name="request"', b"{}")] * 2, "form part request is given twice"),
        ([('Content-Disposition: form-data; name="fps"', b"2")], "form field 'fps' is unknown"),
        ([("Content-Type: image/png", b"x")], "form part 1 has no name"),
    ],
)
def test_a_wrong_form_is_refused(parts: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_form(*parts)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", form((FILE, b"x"))),
        ("multipart/form-data; boundary=other", form((FILE, b"x"))),
        ("multipart/form-data; boundary=frontier", form((FILE, b"x"))[:-6]),
        ("multipart/form-data; boundary=frontier", form((FILE, b"xyz"))[:-20]),
        ("multipart/form-data; boundary=frontier", b""),
        ("multipart/form-data; boundary=" + "x" * 300, form((FILE, b"x"))),
        ("multipart/form-data; boundary=frontier", b"--frontier\r\nBad Header\x00: x\r\n\r\n"),
    ],
)
def test_a_body_that_does_not_keep_to_its_boundary_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="multipart/form-data"):
        parse({"content-type": content_type}, "", [], body, 64)


def test_a_raw_body_takes_its_options_from_the_query() -> None:
    query = [("fps", "0.5"), ("max_frames", "7"), ("allow_partial", "true"), ("dtype", "float16"), ("uuid", "u1")]
    job = parse({"content-type": "video/mp4; codecs=avc1"}, "", query, b"bytes", 64)
    (item,) = job.items
    assert (item.kind, item.source, item.uuid) == ("video", b"bytes", "u1")
    assert (item.options.fps, item.options.max_frames, item.options.allow_partial) == (0.5, 7, True)
    assert job.options.dtype == "float16"
    assert parse({"content-type": "application/octet-stream"}, "", [], b"x", 64).items[0].kind is None
    assert parse({"content-type": "IMAGE/Nonsense"}, "", [], b"x", 64).items[0].kind == "image"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([("fsp", "2")], "fsp: unknown field"),
        ([("fps", "2"), ("fps", "3")], "query: fps is given twice"),
        ([("fps", "fast")], "fps: Input should be a valid number"),
        ([("max_frames", "0")], "max_frames: "),
        ([("allow_partial", "perhaps")], "allow_partial: "),
    ],
)
def test_a_wrong_query_is_refused(query: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse({"content-type": "image/png"}, "", query, b"x", 64)
    assert message in str(refusal.value)


def test_a_query_beside_a_json_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="query: 'fps' is unknown"):
        parse({"content-type": "application/json"}, "", [("fps", "2")], b'{"input":["x"]}', 64)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "audio/wav"])
def test_another_content_type_is_refused_with_the_allowed_ones(content_type: str) -> None:
    with pytest.raises(UnsupportedMedia, match=r"allowed: application/json, multipart/form-data, image/\*"):
        parse({"content-type": content_type}, "", [], b"x", 64)


def test_compressed_bodies_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="Content-Encoding"):
        parse({"content-type": "application/json", "content-encoding": "gzip"}, "", [], b"", 64)


@pytest.mark.parametrize(
    ("accept", "asked", "form_and_stream"),
    [
        ("*/*", None, ("base64", False)),
        ("", "float", ("float", False)),
        ("application/vnd.safetensors", None, ("safetensors", False)),
        ("Application/vnd.Safetensors;q=1, */*", "safetensors", ("safetensors", False)),
        ("*/*", "safetensors", ("safetensors", False)),
        ("application/x-ndjson", None, ("base64", True)),
        ("application/x-ndjson", "torch_base64", ("torch_base64", True)),
        ("text/html,application/vnd.safetensors", None, ("safetensors", False)),
        ("application/vnd.safetensors;q=0, */*", None, ("base64", False)),
        ("application/x-ndjson; q=0.0", None, ("base64", False)),
        ("application/x-ndjson;q=0.5", None, ("base64", True)),
    ],
)
def test_the_answers_form_comes_from_the_field_or_the_header(
    accept: str, asked: str | None, form_and_stream: tuple[str, bool]
) -> None:
    document = {"input": ["x"]} | ({"encoding_format": asked} if asked else {})
    job = parse_json(document, accept=accept)
    assert (job.encoding_format, job.stream) == form_and_stream


@pytest.mark.parametrize(
    ("accept", "asked"), [("application/vnd.safetensors", "base64"), ("application/x-ndjson", "safetensors")]
)
def test_a_field_and_a_header_that_contradict_each_other_are_refused(accept: str, asked: str) -> None:
    with pytest.raises(InvalidRequest, match="header Accept asks for"):
        parse_json({"input": ["x"], "encoding_format": asked}, accept=accept)


async def pieces(*chunks: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for chunk in chunks:
        await asyncio.sleep(pause_s)
        yield chunk


def unbounded() -> Hold:
    return Hold(ByteBudget(1 << 30, "request bodies"))


async def test_a_body_is_collected_up_to_its_limit() -> None:
    assert await read_body(pieces(b"ab", b"", b"c"), 3, 3, 1.0, unbounded()) == b"abc"
    with pytest.raises(LimitExceeded, match="request body of 4 bytes, limit 3"):
        await read_body(pieces(), 4, 3, 1.0, unbounded())


async def test_a_chunked_body_is_stopped_while_it_is_read() -> None:  # M22
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 100

    with pytest.raises(LimitExceeded, match="more than 1000 bytes"):
        await read_body(endless(), None, 1000, 5.0, unbounded())
    assert read == 11


async def test_a_body_holds_what_has_arrived_and_not_what_it_announces() -> None:
    budget = ByteBudget(100, "request bodies")
    rest = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"x" * 10
        await rest.wait()
        yield b"x" * 80

    with budget.hold() as slow, budget.hold() as other:
        reading = asyncio.create_task(read_body(slowly(), 90, 90, 5.0, slow))
        assert await read_body(pieces(b"y" * 20), 20, 90, 1.0, other) == b"y" * 20
        assert budget.held_bytes == 30
        rest.set()
        with pytest.raises(Overloaded, match="30 bytes of request bodies are held and this one has 80 more, limit 100"):
            await reading
    assert budget.held_bytes == 0


async def test_an_announced_length_without_room_is_refused_before_a_byte_is_read() -> None:
    budget = ByteBudget(100, "request bodies")

    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    with budget.hold() as first, budget.hold() as second:
        first.take(60)
        with pytest.raises(Overloaded, match="60 bytes of request bodies are held and this one has 41 more, limit 100"):
            await read_body(never(), 41, 90, 1.0, second)


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with pytest.raises(ClientTooSlow, match=r"2 bytes of the request body arrived within 0\.05 s"):
        await read_body(pieces(b"ab", b"cd", pause_s=0.04), None, 100, 0.05, unbounded())


def test_a_document_of_very_many_values_is_refused_before_it_is_parsed() -> None:
    document = {"input": ["x"]} | {f"k{i}": 0 for i in range(70_000)}
    with pytest.raises(LimitExceeded, match=r"request body with 700\d\d commas and brackets, limit 65536"):
        parse_json(document)


def test_text_of_a_conversation_does_not_count_as_items() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "and, then,"}]} for _ in range(100)]
    messages.append({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]})
    assert len(parse_json({"messages": messages}).items) == 1


def test_a_form_may_have_a_preamble_and_an_epilogue() -> None:
    body = b"This is a message in several parts.\r\n" + form((FILE, b"--frontier in the middle")) + b"\r\nthe end"
    (item,) = parse({"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, "", [], body, 64).items
    assert item.source == b"--frontier in the middle"


def test_a_file_may_have_only_an_encoded_name() -> None:
    head = "Content-Disposition: form-data; name=\"f\"; filename*=UTF-8''%e2%82%ac.png"
    assert parse_form((head, b"data")).items[0].source == b"data"


def test_an_empty_content_encoding_is_none() -> None:
    assert parse({"content-type": "image/png", "content-encoding": ""}, "", [], b"x", 64).items
