"""`EncoderConfig`: what a checkpoint's `config.json` and `preprocessor_config.json` say, checked once and frozen."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from encoder.errors import CheckpointMismatch
from encoder.families import FAMILY_MEDIA, FAMILY_VISION, Family

logger = logging.getLogger(__name__)

# The reference leaves the tower's RMSNorm epsilon unset; PyTorch then takes float32's machine epsilon, for bf16 too.
RMS_NORM_EPS = 2.0**-23
DEMO_KEY = "demo_weights"  # the one key of `config.json` that is ours: written with demo weights, and nowhere else
# Bounds that no real model comes near; beyond them arithmetic or memory would fail somewhere less clear.
MAX_INTEGER = 1 << 24
MAX_COUNT = 1024  # layers, and rows of the time table
MAX_NUMBER = 1e6
ROPE_BASE = 10_000.0
ROPE_MAX_SIDE = 512  # the reference's angle table has 512 x 512 positions


@dataclass(frozen=True)
class Chessboard:
    """Background of transparent pictures: squares of `square_px`, white at the top left."""

    square_px: int = 8
    white_on_top_left: bool = True
    white: int = 255
    gray: int = 180


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config` of `config.json`, under the checkpoint's own key names where they are readable.

    Widths are in channels, table sides in patches. `head_dim` is `qkv_hidden_size / num_heads`.
    """

    patch_size: int
    hidden_size: int
    qkv_hidden_size: int
    num_heads: int
    num_layers: int
    intermediate_size: int
    norm_type: Literal["rmsnorm", "layernorm"]
    attn_bias: bool
    linear_bias: bool
    patch_embed_proj_bias: bool
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    pos_emb_interpolation_mode: Literal["bilinear", "bicubic"]
    merge_kernel_size: tuple[int, int]
    mm_projector_type: Literal["patchmerger", "patchmergerv2"]
    projector_ln_eps: float
    text_hidden_size: int
    norm_eps: float  # of the norms inside the tower

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.num_heads


@dataclass(frozen=True)
class MediaConfig:
    """`media_proc_cfg` of `preprocessor_config.json`. Limits are in patches, rates in frames per second."""

    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    in_patch_limit_each_frame: int
    in_patch_limit_video: int | None
    sample_fps: float
    temporal_merge_kernel_size: int
    timestamp_mode: Literal["hh:mm:ss.fff", "mm:ss.fff", "mm:ss"]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    transparent_background: Chessboard | None  # None: convert to RGB first, dropping alpha


@dataclass(frozen=True)
class EncoderConfig:
    """One model: its family, tower and projector, and preprocessing."""

    family: Family
    vision: VisionConfig
    media: MediaConfig
    media_placeholder_token_id: int
    source: str  # the directory or demo spec it was read from
    is_demo: bool = False  # made-up weights, also where they were exported to a directory

    def with_norm_eps(self, norm_eps: float) -> "EncoderConfig":
        """The same model with another epsilon in the tower's norms (old PyTorch took 2**-7 for bf16 RMSNorm)."""
        return replace(self, vision=replace(self.vision, norm_eps=norm_eps))


# Values the reference implements; any other one would need other code, so it is refused rather than ignored.
_IMPLEMENTED = {
    "norm_type": ("rmsnorm", "layernorm"),
    "pos_emb_type": ("divided_fixed",),
    "pos_emb_interpolation_mode": ("bilinear", "bicubic"),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger", "patchmergerv2"),
    "mlp_type": ("mlp2",),
}


def parse_config(
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    *,
    source: str,
) -> EncoderConfig:
    """Turn the two parsed JSON files into an `EncoderConfig`.

    Args:
        config: `config.json`; `model_type` chooses the family whose value every absent key takes.
        preprocessor: `preprocessor_config.json`, or None where there is no such file (the family's released values).
        source: named in every error.
    Raises:
        CheckpointMismatch: a type or value that is not implemented, or numbers that do not fit each other.
    """

    def refuse(what: str) -> NoReturn:
        raise CheckpointMismatch(f"{source}: {what}")

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILY_VISION:
        refuse(f"config.json: model_type is {model_type!r}, allowed: {', '.join(FAMILY_VISION)}")
    family: Family = model_type
    vision = _vision(config.get("vision_config", {}), family, refuse)
    if preprocessor is None:
        logger.warning("%s has no preprocessor_config.json: using the released values of %s", source, family)
        media_section: Any = FAMILY_MEDIA[family]
    else:
        media_section = preprocessor.get("media_proc_cfg")
    media = _media(media_section, family, refuse)
    if media.patch_size != vision.patch_size or vision.merge_kernel_size != (media.merge_kernel_size,) * 2:
        refuse(
            f"config.json has patches of {vision.patch_size} merged {vision.merge_kernel_size}, "
            f"preprocessor_config.json {media.patch_size} merged {media.merge_kernel_size}: they must agree"
        )
    if media.temporal_merge_kernel_size > vision.pos_emb_time:
        refuse(
            f"temporal_merge_kernel_size {media.temporal_merge_kernel_size} exceeds "
            f"the {vision.pos_emb_time} rows of the time table (init_pos_emb_time)"
        )
    if media.patch_limit_on_one_side > ROPE_MAX_SIDE:
        refuse(
            f"patch_limit_on_one_side {media.patch_limit_on_one_side} exceeds "
            f"the {ROPE_MAX_SIDE} positions a side of the tower's rotary table"
        )
    return EncoderConfig(
        family=family,
        vision=vision,
        media=media,
        media_placeholder_token_id=_integer(
            config.get("media_placeholder_token_id", 163605), "config.json: media_placeholder_token_id", refuse
        ),
        source=source,
        is_demo=config.get(DEMO_KEY) is True,
    )


_Refuse = Callable[[str], NoReturn]


def _vision(section: Any, family: Family, refuse: _Refuse) -> VisionConfig:
    where = "config.json: vision_config"
    if not isinstance(section, Mapping):
        refuse(f"{where} must be an object, got {type(section).__name__}")
    keys = FAMILY_VISION[family] | {key: section[key] for key in section if key in FAMILY_VISION[family]}
    for key, allowed in _IMPLEMENTED.items():
        if keys[key] not in allowed:
            refuse(f"{where}.{key} is {keys[key]!r}, implemented: {', '.join(allowed)}")

    def integer(key: str) -> int:
        return _integer(keys[key], f"{where}.{key}", refuse)

    def flag(key: str) -> bool:
        if not isinstance(keys[key], bool):
            refuse(f"{where}.{key} must be true or false, got {keys[key]!r}")
        return bool(keys[key])

    hidden = integer("vt_hidden_size")
    qkv = hidden if keys["qkv_hidden_size"] is None else integer("qkv_hidden_size")
    heads = integer("vt_num_attention_heads")
    merge = keys["merge_kernel_size"]
    if not (isinstance(merge, list | tuple) and list(merge) == [2, 2]):
        refuse(f"{where}.merge_kernel_size is {merge!r}, implemented: [2, 2]")
    if hidden % 2:
        refuse(f"{where}.vt_hidden_size is {hidden}, must be even (the time term is half sines, half cosines)")
    if qkv % heads or (qkv // heads) % 4:
        refuse(f"{where}: {qkv} attention channels over {heads} heads; the head size must be a multiple of 4")
    for key in ("vt_num_hidden_layers", "init_pos_emb_time"):
        if integer(key) > MAX_COUNT:
            refuse(f"{where}.{key} is {keys[key]}, allowed up to {MAX_COUNT}")
    eps = _number(keys["projector_ln_eps"], f"{where}.projector_ln_eps", refuse)
    if eps <= 0:
        refuse(f"{where}.projector_ln_eps must be positive, got {eps}")
    mm_hidden = section.get("mm_hidden_size")  # null: as the tower
    if mm_hidden is not None and mm_hidden != hidden:
        refuse(f"{where}.mm_hidden_size is {mm_hidden!r}, must equal vt_hidden_size {hidden}")
    return VisionConfig(
        patch_size=integer("patch_size"),
        hidden_size=hidden,
        qkv_hidden_size=qkv,
        num_heads=heads,
        num_layers=integer("vt_num_hidden_layers"),
        intermediate_size=integer("vt_intermediate_size"),
        norm_type=keys["norm_type"],
        attn_bias=flag("attn_bias"),
        linear_bias=flag("linear_bias"),
        patch_embed_proj_bias=flag("patch_embed_proj_bias"),
        pos_emb_height=integer("init_pos_emb_height"),
        pos_emb_width=integer("init_pos_emb_width"),
        pos_emb_time=integer("init_pos_emb_time"),
        pos_emb_interpolation_mode=keys["pos_emb_interpolation_mode"],
        merge_kernel_size=(2, 2),
        mm_projector_type=keys["mm_projector_type"],
        projector_ln_eps=eps,
        text_hidden_size=integer("text_hidden_size"),
        norm_eps=RMS_NORM_EPS if keys["norm_type"] == "rmsnorm" else 1e-5,
    )


def _media(section: Any, family: Family, refuse: _Refuse) -> MediaConfig:
    where = "preprocessor_config.json: media_proc_cfg"
    if not isinstance(section, Mapping):
        refuse(f"{where} must be an object, got {type(section).__name__}")
    # The two transparency keys mean something by being absent, so the family never fills them in.
    defaults = {k: v for k, v in FAMILY_MEDIA[family].items() if not k.startswith("transparent_bg")}
    keys = defaults | dict(section)

    def integer(key: str) -> int:
        return _integer(keys[key], f"{where}.{key}", refuse)

    def triple(key: str) -> tuple[float, float, float]:
        value = keys[key]
        if not (isinstance(value, list | tuple) and len(value) == 3):
            refuse(f"{where}.{key} must be three numbers, got {value!r}")
        r, g, b = (_number(v, f"{where}.{key}", refuse) for v in value)
        return r, g, b

    if keys["fixed_output_tokens"] is not None:
        refuse(f"{where}.fixed_output_tokens is {keys['fixed_output_tokens']!r}, implemented: null")
    if keys["timestamp_mode"] not in ("hh:mm:ss.fff", "mm:ss.fff", "mm:ss"):
        refuse(f"{where}.timestamp_mode is {keys['timestamp_mode']!r}, implemented: hh:mm:ss.fff, mm:ss.fff, mm:ss")
    std = triple("image_std")
    if min(std) < 1 / MAX_NUMBER:
        refuse(f"{where}.image_std must be at least {1 / MAX_NUMBER:g}, got {list(std)}")
    sample_fps = _number(keys["sample_fps"], f"{where}.sample_fps", refuse)
    if sample_fps <= 0:
        refuse(f"{where}.sample_fps must be positive, got {sample_fps}")
    image_limit = integer("in_patch_limit")
    return MediaConfig(
        patch_size=integer("patch_size"),
        merge_kernel_size=integer("merge_kernel_size"),
        in_patch_limit=image_limit,
        patch_limit_on_one_side=integer("patch_limit_on_one_side"),
        in_patch_limit_each_frame=(
            image_limit if keys["in_patch_limit_each_frame"] is None else integer("in_patch_limit_each_frame")
        ),
        in_patch_limit_video=None if keys["in_patch_limit_video"] is None else integer("in_patch_limit_video"),
        sample_fps=sample_fps,
        temporal_merge_kernel_size=integer("temporal_merge_kernel_size"),
        timestamp_mode=keys["timestamp_mode"],
        image_mean=triple("image_mean"),
        image_std=std,
        transparent_background=_chessboard(keys, where, refuse),
    )


def _chessboard(keys: Mapping[str, Any], where: str, refuse: _Refuse) -> Chessboard | None:
    board, stage = keys.get("transparent_bg_config"), keys.get("transparent_bg_fill_stage")
    if board is None and stage is None:
        return None
    if stage != "after_resize":
        refuse(f"{where}.transparent_bg_fill_stage is {stage!r}, implemented: after_resize (or both keys absent)")
    if not isinstance(board, Mapping) or board.get("pattern") != "chessboard":
        refuse(f"{where}.transparent_bg_config is {board!r}, implemented: the pattern 'chessboard'")
    default = Chessboard()
    levels = [board.get("chessboard_white_value", default.white), board.get("chessboard_gray_value", default.gray)]
    for level in levels:
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 255:
            refuse(f"{where}.transparent_bg_config: levels must be 0 to 255, got {level!r}")
    square = board.get("chessboard_square_size", default.square_px)
    white_first = board.get("chessboard_square_on_top_left", default.white_on_top_left)
    if not isinstance(white_first, bool):
        refuse(
            f"{where}.transparent_bg_config.chessboard_square_on_top_left must be true or false, got {white_first!r}"
        )
    return Chessboard(
        square_px=_integer(square, f"{where}.transparent_bg_config.chessboard_square_size", refuse),
        white_on_top_left=white_first,
        white=levels[0],
        gray=levels[1],
    )


def _integer(value: Any, where: str, refuse: _Refuse) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INTEGER:
        refuse(f"{where} must be an integer from 1 to {MAX_INTEGER}, got {_shown(value)}")
    return int(value)


def _number(value: Any, where: str, refuse: _Refuse) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        refuse(f"{where} must be a number of magnitude up to {MAX_NUMBER:g}, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
