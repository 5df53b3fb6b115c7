"""A checkpoint directory: its two JSON files, and which safetensors file holds which of our tensors."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from encoder.config import EncoderConfig, parse_config
from encoder.demo import demo_config, is_demo_spec
from encoder.errors import CheckpointMismatch, SetupError

PREFIXES = ("vision_tower.", "mm_projector.")  # everything else in a checkpoint is the language model's
CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


def load_config(path: str | Path, *, rms_norm_eps: float | None = None) -> EncoderConfig:
    """Read a checkpoint directory's configuration, or a demo model's.

    Args:
        path: a directory with config.json (and preprocessor_config.json), or a demo spec such as "demo:k3-tiny".
        rms_norm_eps: epsilon of the tower's RMSNorms, instead of the reference's 2**-23.
    Raises:
        CheckpointMismatch: a file that is missing, not JSON, or not a model that is implemented here.
        SetupError: an epsilon for a tower without RMSNorm.
    """
    source = str(path)
    parsed: dict[str, Any]
    preprocessor: dict[str, Any] | None
    if is_demo_spec(source):
        parsed, preprocessor = demo_config(source)
    else:
        directory = Path(path).expanduser()
        source = str(directory)
        parsed, preprocessor = read_json_files(directory)
    config = parse_config(parsed, preprocessor, source=source)
    if rms_norm_eps is None:
        return config
    if config.vision.norm_type != "rmsnorm":
        raise SetupError(f"{source}: an RMSNorm epsilon was given, but the tower's norms are {config.vision.norm_type}")
    if not isinstance(rms_norm_eps, int | float) or not 0 < rms_norm_eps < 1:
        raise SetupError(f"RMSNorm epsilon of {rms_norm_eps!r}: must be between 0 and 1")
    return config.with_norm_eps(rms_norm_eps)


def read_json_files(directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json, and preprocessor_config.json or None where there is none."""
    try:
        is_directory = directory.is_dir()
    except OSError as error:
        raise CheckpointMismatch(f"{str(directory)[:200]} cannot be read: {error.strerror}") from error
    if not is_directory:
        raise CheckpointMismatch(f"{directory} is neither a checkpoint directory nor a demo model")
    preprocessor = directory / PREPROCESSOR_FILE
    return read_json(directory / CONFIG_FILE), read_json(preprocessor) if _is_there(preprocessor) else None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; anything else is a `CheckpointMismatch` that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointMismatch(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointMismatch(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def find_tensors(directory: Path) -> dict[str, Path]:
    """Name -> file of every tensor of ours. With an index, files that hold none of them are not even looked for.

    Raises:
        CheckpointMismatch: no index and no model.safetensors, or an index without a sound weight_map.
    """
    index = directory / INDEX_FILE
    if not _is_there(index):
        path = directory / WEIGHTS_FILE
        return dict.fromkeys(_ours(open_safetensors(path).keys()), path)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointMismatch(f"{index} has no weight_map object")
    found = {}
    for name in _ours(weight_map):
        shard = weight_map[name]
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointMismatch(f"{index}: {name} is in {shard!r}, which is not a file name")
        found[name] = directory / shard
    # A shard may hold tensors under our prefixes that the index forgot: they are seen, and refused as left over. What
    # the index does name is taken from where it says, and from nowhere else.
    for path in sorted(set(found.values())):
        for name in _ours(open_safetensors(path).keys()) if path.exists() else ():
            if found.setdefault(name, path) != path:
                raise CheckpointMismatch(f"{path} holds {name} too; the index places it in {found[name].name}")
    return found


def open_safetensors(path: Path) -> Any:
    """Memory-map a safetensors file (a `safe_open` handle); raises `CheckpointMismatch` naming it if that fails."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointMismatch(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointMismatch(f"{path} is not a readable safetensors file: {error}") from error


def _is_there(path: Path) -> bool:
    """A link that leads nowhere counts: reading it then says what is wrong."""
    return path.exists() or path.is_symlink()


def _ours(names: Any) -> list[str]:
    return [name for name in names if name.startswith(PREFIXES)]
