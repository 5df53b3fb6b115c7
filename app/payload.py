"""Embeddings -> the bytes of an answer, in pieces: no tensor is copied whole, and no long call holds the interpreter.

A picture at Kimi-K3's limit has 240 MB of embedding. One call that turns it into text would stop the event loop, and
with it every health check, for as long as it takes; a piece takes well under a millisecond.
"""

import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import orjson
import pybase64
import torch
from pydantic import BaseModel
from pydantic_core import to_json
from torch import Tensor

from app.errors import DtypeOverflow
from app.schemas import DtypeName, EncodingFormat

DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_SAFETENSORS_DTYPES: dict[DtypeName, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

RAW_PIECE_BYTES = 2 * 1024 * 1024  # nothing is made of them: the kernel takes what has room
PIECE_BYTES = 768 * 1024  # a multiple of 3, so that base64 pieces join without padding between them


@dataclass(frozen=True)
class Body:
    """Bytes of known length, made piece by piece as they are sent."""

    length: int
    pieces: Callable[[], Iterator[bytes | memoryview]]

    @staticmethod
    def of(*parts: "bytes | Body") -> "Body":
        """The parts one after another."""

        def pieces() -> Iterator[bytes | memoryview]:
            for part in parts:
                if isinstance(part, Body):
                    yield from part.pieces()
                else:
                    yield part

        return Body(sum(part.length if isinstance(part, Body) else len(part) for part in parts), pieces)

    def tobytes(self) -> bytes:
        return b"".join(self.pieces())


def convert(embedding: Tensor, dtype: DtypeName) -> Tensor:
    """(m, E) in the answer's dtype, contiguous on the host, in memory of its own.

    Rows come as views of a whole batch: `torch.save` would write all of it, other callers' rows too, and keeping them
    would keep it.

    Raises:
        DtypeOverflow: a finite value became infinite (float16 ends at 65504).
    """
    converted = embedding.to(DTYPES[dtype]).contiguous()
    if converted.untyped_storage().nbytes() != converted.nbytes:
        converted = converted.clone()
    if dtype == "float16" and not bool(converted.isfinite().all()):
        largest = float(embedding.abs().max())
        raise DtypeOverflow(f"the embedding has a value of magnitude {largest:.6g}, float16 ends at 65504")
    return converted


def is_ready(embedding: Tensor, dtype: DtypeName, encoding_format: EncodingFormat) -> bool:
    """Whether `convert` and `embedding_json` have nothing to do but to point at it."""
    is_same = embedding.dtype == DTYPES[dtype] and dtype != "float16"  # which is searched for values that are too large
    is_whole = embedding.is_contiguous() and embedding.untyped_storage().nbytes() == embedding.nbytes
    return is_same and is_whole and encoding_format in ("base64", "safetensors")


def raw(tensor: Tensor) -> Body:
    """The tensor's own memory, little-endian and row-major."""
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    return Body(view.nbytes, lambda: _slices(view, RAW_PIECE_BYTES))


def _slices(view: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, piece_bytes):
        yield view[start : start + piece_bytes]


def _base64(view: memoryview) -> Body:
    length = (view.nbytes + 2) // 3 * 4
    return Body(length, lambda: (pybase64.b64encode(piece) for piece in _slices(view, PIECE_BYTES)))


def embedding_json(tensor: Tensor, encoding_format: EncodingFormat) -> Body:
    """The JSON value of one `embedding` field."""
    match encoding_format:
        case "float":
            # Row by row: one call for the whole tensor would hold the interpreter for seconds.
            rows = [orjson.dumps(row.numpy(), option=orjson.OPT_SERIALIZE_NUMPY) for row in tensor.to(torch.float32)]
            return Body.of(b"[", b",".join(rows), b"]")
        case "torch_base64":
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            return Body.of(b'"', _base64(buffer.getbuffer()), b'"')
        case _:
            return Body.of(b'"', _base64(tensor.reshape(-1).view(torch.uint8).numpy().data), b'"')


def entry_json(entry: BaseModel, embedding: Body | None) -> Body:
    """One element of `data`, with its embedding where it has one."""
    head = to_json(entry, exclude_none=True)
    return Body.of(head) if embedding is None else Body.of(head[:-1], b',"embedding":', embedding, b"}")


def answer_json(document: BaseModel, entries: Sequence[Body]) -> Body:
    """A whole answer: `document` has an empty `data`, which is replaced by the entries."""
    fields = {name: to_json(getattr(document, name), exclude_none=True) for name in type(document).model_fields}
    parts: list[bytes | Body] = []
    for name, value in fields.items():
        parts.append((b"," if parts else b"{") + b'"%s":' % name.encode())
        if name == "data":
            parts.append(b"[")
            for i, entry in enumerate(entries):
                parts += [b",", entry] if i else [entry]
            parts.append(b"]")
        else:
            parts.append(value)
    return Body.of(*parts, b"}")


def safetensors_file(
    embeddings: Sequence[Tensor], token_counts: Sequence[int], width: int, dtype: DtypeName, response: dict[str, object]
) -> Body:
    """A safetensors file: the header, then each embedding's own memory.

    Args:
        embeddings: (m_i, E) of the good items, in order, in `dtype`.
        token_counts: rows of every item in order, 0 for a failed one.
        response: the JSON answer without `embedding` fields; goes under `__metadata__["response"]`.
    Source: the safetensors format; the header's length as uint64 comes first.
    """
    offsets = list(accumulate(token_counts, initial=0))
    tail = struct.pack(f"<{len(offsets)}q", *offsets)
    split = offsets[-1] * width * DTYPES[dtype].itemsize
    header = {
        "__metadata__": {"response": json.dumps(response, separators=(",", ":"))},
        "embeddings": {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": [offsets[-1], width],
            "data_offsets": [0, split],
        },
        "token_offsets": {"dtype": "I64", "shape": [len(offsets)], "data_offsets": [split, split + len(tail)]},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format asks for aligned data
    return Body.of(struct.pack("<Q", len(head)) + head, *(raw(embedding) for embedding in embeddings), tail)
