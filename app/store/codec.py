"""`StoredEmbedding` <-> a safetensors file with one tensor, whose metadata holds the rest and a digest of it all."""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Annotated, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from app.decode import Kind
from app.store.entry import StoredEmbedding, memory
from encoder import Grid

FORMAT = "moonvit-stored-embedding/1"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 16 << 20  # a film has about 50 bytes of it for each sampled frame


class DamagedError(Exception):
    """Bytes that are not an entry as it was written."""


_Count = Annotated[int, Field(ge=1)]


class _Facts(BaseModel):
    """`StoredEmbedding` without its tensor."""

    model_config = ConfigDict(strict=True, extra="forbid")

    key: str
    kind: Kind
    grids: tuple[tuple[_Count, _Count, _Count], ...]
    segment_tokens: tuple[_Count, ...]
    original_size: tuple[_Count, _Count]
    resized_size: tuple[_Count, _Count]
    frame_indices: tuple[int, ...] | None
    start_s: tuple[float, ...] | None
    timestamps: tuple[str, ...] | None


class _Metadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: str
    entry: str
    sha256: str


class _TensorInfo(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: tuple[_Count, _Count]
    data_offsets: tuple[int, int]


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    metadata: _Metadata = Field(alias="__metadata__")
    embedding: _TensorInfo


_HEADER = TypeAdapter(_Header)
_FACTS = TypeAdapter(_Facts)


def dump(entry: StoredEmbedding) -> tuple[bytes, memoryview]:
    """The two parts of the file: its header, and the tensor's own memory. Digesting takes about a second a gigabyte."""
    facts = _Facts.model_construct(**{name: getattr(entry, name) for name in _Facts.model_fields}).model_dump_json()
    name, shape = _NAMES[entry.tensor.dtype], tuple(entry.tensor.shape)
    body = memory(entry.tensor)
    header = {
        "__metadata__": {"format": FORMAT, "entry": facts, "sha256": _digest(facts, name, shape, body)},
        "embedding": {"dtype": name, "shape": shape, "data_offsets": [0, body.nbytes]},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format asks for aligned data
    return struct.pack("<Q", len(head)) + head, body


def load(file: BinaryIO, num_bytes: int, key: str) -> StoredEmbedding:
    """Read an entry into memory of its own; nothing is allocated before the sizes agree.

    Args:
        num_bytes: length of the whole file.
    Raises:
        DamagedError: anything but the entry of that key, byte for byte as it was written.
    """
    header, header_bytes = _read_header(file, num_bytes)
    info, metadata = header.embedding, header.metadata
    dtype = DTYPES.get(info.dtype)
    if metadata.format != FORMAT or dtype is None:
        raise DamagedError("another format")
    body_bytes = info.shape[0] * info.shape[1] * dtype.itemsize
    if info.data_offsets != (0, body_bytes) or header_bytes + body_bytes != num_bytes:
        raise DamagedError("its length is not what its header says")
    tensor = torch.empty(info.shape, dtype=dtype)
    body = memory(tensor)
    if _read_into(file, body) != body_bytes or file.read(1):
        raise DamagedError("its length is not what its header says")
    if _digest(metadata.entry, info.dtype, info.shape, body) != metadata.sha256:
        raise DamagedError("its digest is another one")
    return _entry(metadata.entry, tensor, key)


def _read_header(file: BinaryIO, num_bytes: int) -> tuple[_Header, int]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise DamagedError("shorter than any entry")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes):
        raise DamagedError("no header")
    try:
        return _HEADER.validate_json(file.read(length)), 8 + length
    except ValidationError as error:
        raise DamagedError("no header of ours") from error


def _read_into(file: BinaryIO, view: memoryview) -> int:
    read: Callable[[memoryview], int | None] = file.readinto  # type: ignore[attr-defined]
    done = 0
    while done < view.nbytes and (count := read(view[done:])):
        done += count
    return done


def _digest(facts: str, dtype: str, shape: tuple[int, ...], body: memoryview) -> str:
    digest = hashlib.sha256(f"{facts}\n{dtype} {shape[0]} {shape[1]}\n".encode())
    digest.update(body)
    return digest.hexdigest()


def _entry(text: str, tensor: Tensor, key: str) -> StoredEmbedding:
    try:
        facts = _FACTS.validate_json(text)
    except ValidationError as error:
        raise DamagedError("no facts of ours") from error
    if facts.key != key:
        raise DamagedError("the entry of another key")
    return StoredEmbedding(
        key=key,
        tensor=tensor,
        kind=facts.kind,
        grids=tuple(Grid(*grid) for grid in facts.grids),
        segment_tokens=facts.segment_tokens,
        original_size=facts.original_size,
        resized_size=facts.resized_size,
        frame_indices=facts.frame_indices,
        start_s=facts.start_s,
        timestamps=facts.timestamps,
    )
