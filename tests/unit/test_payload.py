"""Answers are made in pieces whose lengths are known before, and hold exactly the numbers."""

import base64
import io
import json

import orjson
import pytest
import torch
from safetensors.torch import load

from app.answer import EncodeAnswer
from app.errors import DtypeOverflow
from app.payload import (
    PIECE_BYTES,
    RAW_PIECE_BYTES,
    Body,
    answer_json,
    convert,
    embedding_json,
    entry_json,
    is_ready,
    raw,
    safetensors_file,
)
from app.schemas import FailedItem, Problem, Timing, Usage


def numbers(rows: int, width: int = 96, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 7, 5000])
@pytest.mark.parametrize("encoding_format", ["base64", "torch_base64", "float"])
def test_a_json_value_has_its_stated_length_and_the_numbers(rows: int, encoding_format: str) -> None:
    tensor = numbers(rows)
    body = embedding_json(tensor, encoding_format)  # type: ignore[arg-type]
    text = body.tobytes()
    assert len(text) == body.length
    value = json.loads(text)
    if encoding_format == "float":
        back = torch.tensor(value).view(-1, 96) if rows else torch.empty((0, 96))
    elif encoding_format == "base64":
        back = torch.frombuffer(bytearray(base64.b64decode(value, validate=True) or b"\0" * 4), dtype=torch.float32)
        back = back[: rows * 96].view(-1, 96)
    else:
        back = torch.load(io.BytesIO(base64.b64decode(value, validate=True)), weights_only=True)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("length", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 2])
def test_base64_pieces_join_without_padding_between_them(length: int) -> None:
    tensor = torch.arange(length, dtype=torch.int64).to(torch.uint8).view(1, -1)
    text = embedding_json(tensor, "base64").tobytes()
    assert base64.b64decode(json.loads(text), validate=True) == bytes(raw(tensor).tobytes())


def test_no_piece_is_large() -> None:
    tensor = numbers(20_000)
    for body, most in ((raw(tensor), RAW_PIECE_BYTES), (embedding_json(tensor, "base64"), PIECE_BYTES // 3 * 4)):
        assert max(len(piece) for piece in body.pieces()) <= most


def test_what_needs_no_work_is_ready_and_nothing_else() -> None:
    tensor = numbers(4).to(torch.bfloat16)
    assert is_ready(tensor, "bfloat16", "safetensors")
    assert is_ready(tensor, "bfloat16", "base64")
    assert not is_ready(tensor, "bfloat16", "torch_base64")
    assert not is_ready(tensor, "bfloat16", "float")
    assert not is_ready(tensor, "float32", "base64")
    assert not is_ready(tensor[:2], "bfloat16", "base64")
    assert not is_ready(tensor.to(torch.float16), "float16", "base64")


def test_raw_pieces_are_the_tensors_own_memory() -> None:
    tensor = numbers(4)
    (piece,) = raw(tensor).pieces()
    tensor[0, 0] = 42.0
    assert torch.frombuffer(bytearray(piece), dtype=torch.float32)[0] == 42.0


def test_conversion_rounds_once_and_refuses_what_does_not_fit() -> None:
    exact = torch.tensor([[1.00390625, -3.0]])
    assert convert(exact, "bfloat16").tolist() == [[1.0, -3.0]]
    assert convert(exact, "float32").data_ptr() == exact.data_ptr()  # already its own
    assert convert(torch.tensor([[65504.0]]), "float16").tolist() == [[65504.0]]
    with pytest.raises(DtypeOverflow, match="magnitude 70000, float16 ends at 65504"):
        convert(torch.tensor([[1.0, -70000.0]]), "float16")


def document() -> EncodeAnswer:
    return EncodeAnswer(
        id="enc-1",
        model="kimi-k3",
        created=7,
        data=[],
        usage=Usage(items=2, patches=0, tokens=0, media_bytes=0),
        timing_ms=Timing(fetch=0, decode=0, queue=0, encode=0, total=1.5),
    )


def test_an_answer_is_spliced_from_its_parts() -> None:
    problem = Problem(type="/problems/x", title="t", status=415, detail='quote " and \\', code="x", index=0)
    failed = entry_json(FailedItem(index=0, type=None, error=problem), None)
    good = entry_json(Usage(items=1, patches=4, tokens=1, media_bytes=9), Body.of(b'"AAAA"'))
    for entries in ([], [failed], [failed, good]):
        body = answer_json(document(), entries)
        text = body.tobytes()
        assert len(text) == body.length
        parsed = orjson.loads(text)
        assert list(parsed) == ["object", "id", "model", "created", "data", "usage", "timing_ms"]
        assert parsed["timing_ms"]["total"] == 1.5
        assert len(parsed["data"]) == len(entries)
    assert parsed["data"][0]["error"]["detail"] == 'quote " and \\'
    assert parsed["data"][1]["embedding"] == "AAAA"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_safetensors_file_reads_back(dtype: str) -> None:
    tensors = [convert(numbers(rows), dtype) for rows in (3, 0, 5)]  # type: ignore[arg-type]
    body = safetensors_file(tensors, [3, 0, 0, 5], 96, dtype, {"id": "x"})  # type: ignore[arg-type]
    data = body.tobytes()
    assert len(data) == body.length
    back = load(data)
    assert torch.equal(back["embeddings"], torch.cat(tensors))
    assert back["token_offsets"].tolist() == [0, 3, 3, 3, 8]


def test_a_safetensors_file_of_nothing() -> None:
    back = load(safetensors_file([], [0], 96, "bfloat16", {}).tobytes())
    assert back["embeddings"].shape == (0, 96)
    assert back["token_offsets"].tolist() == [0, 0]


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 5)])
def test_what_leaves_shares_memory_with_nobody(rows: slice) -> None:
    """Rows are views of a batch, and `torch.save` writes all of a view's memory: other callers' embeddings too."""
    batch = numbers(5)
    own = convert(batch[rows], "float32")
    assert torch.equal(own, batch[rows])
    assert own.untyped_storage().nbytes() == own.nbytes
    saved = base64.b64decode(json.loads(embedding_json(own, "torch_base64").tobytes()))
    back = torch.load(io.BytesIO(saved), weights_only=True)
    assert back.untyped_storage().nbytes() == own.nbytes
