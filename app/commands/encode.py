"""`moonvit-serve encode`: files -> one safetensors file, in this process or through a running service."""

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.commands.flags import given_settings
from app.commands.roads import Reply, Road, Unreachable, in_process, over_http
from app.intake import validate
from app.key_file import KEY
from app.payload import safetensors_file
from app.schemas import DtypeName, Embedding, EncodeAnswer, EncodeOptions, Timing, Usage
from app.settings import load_settings
from encoder import SetupError

FILES_AT_A_TIME = 4  # read, decoded or on the wire; the device takes them in turn anyway


def encode_files(args: argparse.Namespace) -> int:
    """Encode every file; 0 if all of them succeeded, 1 if some failed (the others are written all the same)."""
    output: Path = args.output
    _check_output(output, args.force)
    wanted = ("fps", "max_frames", "allow_partial", "apply_exif_orientation", "dtype")
    options = validate(EncodeOptions, {name: getattr(args, name) for name in wanted})
    given = given_settings(args)
    key = None if args.key_file is None else _read_key(args.key_file)
    if args.url is None:
        if key is not None:
            raise SetupError("--key-file goes with --url: without it no service is asked")
        road = in_process(load_settings(given), args.kind, options)
    elif given:
        raise SetupError(f"--{min(given).replace('_', '-')} cannot be given with --url: the service has its own model")
    else:
        road = over_http(args.url, args.kind, options, key)
    console = Console(stderr=True)
    start = time.monotonic()
    replies = asyncio.run(_encode_all(args.files, road, console))
    good = [reply for reply in replies if reply.tensor is not None]
    if good:
        answer = _join(replies, time.monotonic() - start)
        _write(output, args.force, replies, answer, args.dtype)
        tokens = answer.usage.tokens
        summary = f"{output}: {len(good)} of {len(replies)} files, {tokens} tokens"
        console.print(summary, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print("No file could be encoded; nothing was written.")
    return 0 if len(good) == len(replies) else 1


def _read_key(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SetupError(f"--key-file {path} cannot be read: {reason}") from error
    if not KEY.fullmatch(key):
        raise SetupError(f"--key-file {path} does not hold one API key")
    return key


async def _encode_all(
    paths: Sequence[Path], opening: AbstractAsyncContextManager[Road], console: Console
) -> list[Reply]:
    """One reply per file, in order. The bar moves and a line is printed as each of them finishes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    slots = asyncio.Semaphore(FILES_AT_A_TIME)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("getting ready", total=len(paths))

        async def one(index: int, path: Path) -> Reply:
            async with slots:
                reply = await _encode_one(index, path, road)
            say(_line(path, reply))
            bar.advance(task)
            return reply

        def say(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        async with opening as road:
            say(f"Model: {road.title}")
            bar.update(task, description="encoding")
            return await asyncio.gather(*(one(index, path) for index, path in enumerate(paths)))


async def _encode_one(index: int, path: Path, road: Road) -> Reply:
    try:
        data = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        return Reply.failed(index, "unreadable_file", f"cannot be read: {error.strerror}")
    try:
        return await road.encode(index, data)
    except Unreachable as error:  # it did answer when the command began: what it has encoded is kept
        return Reply.failed(index, "unreachable", str(error))


def _line(path: Path, reply: Reply) -> str:
    entry = reply.entry
    if not isinstance(entry, Embedding):
        return f"{path}: FAILED: {entry.error.detail.removeprefix(f'input[{entry.index}]: ')}"
    width, height = entry.original_size
    grids = ["x".join(map(str, grid)) for grid in entry.grid_thw]
    shown = ", ".join(grids[:3]) + (", ..." if len(grids) > 3 else "")
    return f"{path}: {entry.type} {width}x{height}, grid {shown}, {entry.num_tokens} tokens"


def _join(replies: Sequence[Reply], total_s: float) -> EncodeAnswer:
    """The answers of all files as if they had been one request."""
    usages = [reply.usage for reply in replies if reply.usage]
    timings = [reply.timing for reply in replies if reply.timing]
    slowest = {stage: max(getattr(t, stage) for t in timings) for stage in ("fetch", "decode", "queue", "encode")}
    return EncodeAnswer(
        id=f"enc-{uuid.uuid4().hex}",
        model=next(reply.model for reply in replies if reply.model),
        created=int(time.time()),
        data=[reply.entry for reply in replies],
        usage=Usage(
            items=len(replies),
            patches=sum(usage.patches for usage in usages),
            tokens=sum(usage.tokens for usage in usages),
            media_bytes=sum(usage.media_bytes for usage in usages),
        ),
        timing_ms=Timing(**slowest, total=round(total_s * 1000, 3)),
    )


def _check_output(output: Path, force: bool) -> None:
    """Before any work: is there anything that would be lost, and is there a directory to write into?"""
    if output.is_dir():
        raise SetupError(f"{output} is a directory, the name of a file is needed")
    if output.exists() and not force:
        raise SetupError(f"{output} exists; -f replaces it")
    if not output.absolute().parent.is_dir():
        raise SetupError(f"{output.absolute().parent} is not a directory")


def _write(output: Path, force: bool, replies: Sequence[Reply], answer: EncodeAnswer, dtype: DtypeName) -> None:
    """Write beside the output and rename, so that a reader never sees half a file."""
    tensors = [reply.tensor for reply in replies if reply.tensor is not None]
    counts = [0 if reply.tensor is None else reply.tensor.shape[0] for reply in replies]
    document = answer.model_dump(mode="json", exclude_none=True)
    content = safetensors_file(tensors, counts, tensors[0].shape[1], dtype, document)
    partial: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=output.absolute().parent, prefix=f".{output.name}-", delete=False) as file:
            partial = Path(file.name)
            for piece in content.pieces():
                file.write(piece)
        partial.chmod(0o666 & ~_umask())  # temporary files are private, the result is an ordinary file
        _check_output(output, force)  # again: it may have appeared while files were encoded
        partial.replace(output)
    except OSError as error:
        raise SetupError(f"{output} cannot be written: {error.strerror}") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
