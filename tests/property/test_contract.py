"""The JSON contract: whatever comes in either parses or is refused by name; whatever goes out keeps to its schema."""

import base64
from contextlib import suppress
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.answer import Stamp, answer, entry
from app.decode import MediaOptions
from app.errors import InvalidRequest
from app.intake import Item, Job, parse
from app.payload import answer_json, convert, embedding_json, entry_json, safetensors_file
from app.pipeline import EncodedItem, FailedItem, Result, StageTimes
from app.schemas import EncodeAnswer, EncodeOptions, EncodeRequest
from app.store import StoredEmbedding
from encoder import Grid, InputError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
urls = st.sampled_from(["https://media.example/a.png", "data:image/png;base64,AAAA", "x"])
fps = st.none() | st.floats(0.01, 1000) | st.integers(1, 100)
image_parts = st.fixed_dictionaries(
    {"type": st.just("image_url"), "image_url": urls | st.fixed_dictionaries({"url": urls})},
    optional={"uuid": st.text(max_size=256), "apply_exif_orientation": st.booleans()},
)
video_parts = st.fixed_dictionaries(
    {"type": st.just("video_url"), "video_url": urls | st.fixed_dictionaries({"url": urls})},
    optional={
        "uuid": st.text(max_size=256),
        "fps": fps,
        "max_frames": st.integers(1, 10_000),
        "allow_partial": st.booleans(),
    },
)
options = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("kimi-k3"),
        "encoding_format": st.sampled_from(["base64", "float", "torch_base64", "safetensors"]),
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "delivery": st.just("inline"),
        "on_error": st.sampled_from(["partial", "fail"]),
        "deadline_ms": st.integers(1, 10**6),
        "fps": fps,
        "allow_partial": st.booleans(),
    },
)


def parse_json(document: Any) -> Job:
    return parse({"content-type": "application/json"}, "", [], orjson.dumps(document), 64)


@given(st.lists(urls | image_parts | video_parts, min_size=1, max_size=6), options)
def test_every_document_of_the_contract_parses(parts: list[Any], chosen: dict[str, Any]) -> None:
    job = parse_json({"input": parts, **chosen})
    assert len(job.items) == len(parts)
    for part, item in zip(parts, job.items, strict=True):
        if isinstance(part, str):
            assert (item.kind, item.source) == ("image", part)
            continue
        url = part[part["type"]]
        assert item.kind == part["type"].removesuffix("_url")
        assert item.source == (url if isinstance(url, str) else url["url"])
        assert item.uuid == part.get("uuid")
    assert job.encoding_format == chosen.get("encoding_format", "base64")


@given(json_values)
def test_any_json_parses_or_is_refused(document: Any) -> None:
    with suppress(InputError):  # anything else is a bug
        parse_json(document)


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    for content_type in ("application/json", "multipart/form-data; boundary=b"):
        with suppress(InputError):
            parse({"content-type": content_type}, "", [], body, 64)


@given(options, st.text(min_size=1, max_size=12), json_values)
def test_an_unknown_field_is_always_named(chosen: dict[str, Any], name: str, value: Any) -> None:
    if name in EncodeRequest.model_fields:
        return
    with pytest.raises(InvalidRequest, match="unknown field") as refusal:
        parse_json({"input": ["x"], **chosen, name: value})
    assert (name if name.isprintable() else repr(name)) in str(refusal.value)


def made(index: int, tokens: int, is_good: bool, job: Job) -> Result:
    item = Item("image", b"", MediaOptions(), f"u{index}")
    if not is_good:
        return FailedItem(index, item, InvalidRequest("broken"))
    exact = torch.randn((tokens, 8), generator=torch.Generator().manual_seed(index))
    tensor = convert(exact, job.options.dtype)
    return EncodedItem(
        index=index,
        item=item,
        stored=StoredEmbedding(
            key="emb-" + "0" * 64,
            tensor=exact,
            kind="image",
            grids=(Grid(1, 2, 2 * tokens),),
            segment_tokens=(tokens,),
            original_size=(28 * tokens, 28),
            resized_size=(28 * tokens, 28),
        ),
        cache="miss",
        prompt="p",
        tensor=tensor,
        text=embedding_json(tensor, job.encoding_format),
        media_bytes=7,
        times=StageTimes(),
    )


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6), options)
def test_every_answer_keeps_to_its_schema(items: list[tuple[int, bool]], chosen: dict[str, Any]) -> None:
    job = Job([], EncodeOptions.model_validate(chosen), chosen.get("encoding_format", "base64"), stream=False)
    results = [made(i, tokens, good, job) for i, (tokens, good) in enumerate(items)]
    stamp = Stamp("enc-1", "kimi-k3", 0.0, 1)
    entries = [
        entry_json(entry(r, stamp, job.options.dtype), r.text if isinstance(r, EncodedItem) else None) for r in results
    ]
    body = answer_json(answer(results, stamp, job.options.dtype), entries)
    text = body.tobytes()
    assert len(text) == body.length
    read = EncodeAnswer.model_validate_json(text)
    assert [element.index for element in read.data] == list(range(len(items)))
    assert [element.object == "embedding" for element in read.data] == [good for _, good in items]
    assert read.usage.tokens == sum(tokens for tokens, good in items if good)
    for result, element in zip(results, read.data, strict=True):
        if isinstance(result, EncodedItem) and job.encoding_format == "base64":
            assert (
                base64.b64decode(str(element.model_dump()["embedding"]))
                == result.tensor.view(torch.uint8).numpy().tobytes()
            )
    good_tensors = [result.tensor for result in results if isinstance(result, EncodedItem)]
    counts = [tokens if good else 0 for tokens, good in items]
    file = safetensors_file(good_tensors, counts, 8, job.options.dtype, {"id": "x"})
    assert len(file.tobytes()) == file.length
