"""Write a model's configuration and weights as a checkpoint directory that loads back to the same `weights_sha256`."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from encoder.checkpoint import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHTS_FILE, load_config, read_json_files
from encoder.config import EncoderConfig
from encoder.demo import demo_config, is_demo_spec
from encoder.errors import SetupError
from encoder.families import FAMILY_MEDIA
from encoder.weights import StoredWeights, open_weights, tensor_bytes

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all), after every tensor."""


def export_checkpoint(source: str | Path, directory: str | Path, *, progress: Progress | None = None) -> Path:
    """Write config.json, preprocessor_config.json and model.safetensors of a demo spec or checkpoint directory.

    The directory appears complete or not at all: it is written beside its place and renamed.

    Returns:
        The directory.
    Raises:
        SetupError: the directory exists and is not empty, or cannot be written.
        CheckpointMismatch: the source cannot be read.
    """
    target = Path(directory).resolve()  # a link is followed, not replaced
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SetupError(f"{target} exists and is not an empty directory; nothing was written")
    config = load_config(source)
    stored = open_weights(config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _write_json_files(config, partial)
            with (partial / WEIGHTS_FILE).open("wb") as file:
                _write_safetensors(file, stored, progress)
                file.flush()
                os.fsync(file.fileno())
            partial.chmod(0o755)  # mkdtemp makes it private
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise SetupError(f"cannot write {target}: {error.strerror}") from error
    return target


def _write_json_files(config: EncoderConfig, directory: Path) -> None:
    parsed: dict[str, Any]
    preprocessor: dict[str, Any] | None
    if is_demo_spec(config.source):
        parsed, preprocessor = demo_config(config.source)
    else:
        parsed, preprocessor = read_json_files(Path(config.source))
    if preprocessor is None:
        preprocessor = {"media_proc_cfg": FAMILY_MEDIA[config.family]}
    for name, content in ((CONFIG_FILE, parsed), (PREPROCESSOR_FILE, preprocessor)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(file: IO[bytes], stored: StoredWeights, progress: Progress | None) -> None:
    """Header length, header, data: written tensor by tensor, so that no second copy of the weights is needed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    # Wide types first, as safetensors writes them, keep every tensor aligned to its own size.
    order = sorted(stored.tensors, key=lambda name: (stored.tensors[name].dtype != "F32", name))
    for name in order:
        tensor = stored.tensors[name]
        end = total + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [total, end]}
        total = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    written = 0
    for name in order:
        written += file.write(tensor_bytes(stored.read(name)))
        if progress is not None:
            progress(written, total)
