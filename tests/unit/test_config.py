"""What the checkpoint's two JSON files may say, what an absent key means, and every refusal with its key named."""

import math
from dataclasses import fields
from typing import Any

import pytest

from encoder.config import Chessboard, EncoderConfig, parse_config
from encoder.errors import CheckpointMismatch
from encoder.families import FAMILY_MEDIA


def parse(
    family: str = "kimi_k3", vision: dict[str, Any] | None = None, media: dict[str, Any] | None = None, **top: Any
) -> EncoderConfig:
    """A checkpoint of `family` that names only the given keys."""
    config = {"model_type": family, "vision_config": vision or {}} | top
    return parse_config(config, {"media_proc_cfg": media or {}}, source="model")


def test_absent_keys_of_kimi_k3_take_the_released_values() -> None:
    config = parse("kimi_k3")
    v = config.vision
    assert config.family == "kimi_k3"
    assert config.media_placeholder_token_id == 163605
    assert (v.hidden_size, v.qkv_hidden_size, v.num_heads, v.head_dim) == (1024, 1536, 12, 128)
    assert (v.num_layers, v.intermediate_size, v.text_hidden_size) == (27, 4096, 7168)
    assert (v.norm_type, v.norm_eps) == ("rmsnorm", 1.1920928955078125e-07)
    assert (v.attn_bias, v.linear_bias, v.patch_embed_proj_bias) == (False, False, False)
    assert (v.pos_emb_height, v.pos_emb_width, v.pos_emb_time) == (64, 64, 4)
    assert v.pos_emb_interpolation_mode == "bilinear"
    assert (v.mm_projector_type, v.projector_ln_eps) == ("patchmergerv2", 1e-5)
    assert (v.patch_size, v.merge_kernel_size) == (14, (2, 2))
    m = config.media
    assert (m.in_patch_limit, m.in_patch_limit_each_frame, m.in_patch_limit_video) == (65536, 16384, 655360)
    assert (m.sample_fps, m.timestamp_mode) == (8.0, "hh:mm:ss.fff")


def test_absent_keys_of_kimi_k25_take_the_released_values() -> None:
    config = parse("kimi_k25")
    v = config.vision
    assert config.family == "kimi_k25"
    assert (v.hidden_size, v.qkv_hidden_size, v.num_heads, v.head_dim) == (1152, 1152, 16, 72)
    assert (v.num_layers, v.intermediate_size, v.text_hidden_size) == (27, 4304, 7168)
    assert (v.norm_type, v.norm_eps) == ("layernorm", 1e-5)
    assert (v.attn_bias, v.linear_bias, v.patch_embed_proj_bias) == (True, True, True)
    assert v.pos_emb_interpolation_mode == "bicubic"
    assert (v.mm_projector_type, v.projector_ln_eps) == ("patchmerger", 1e-5)
    m = config.media
    assert (m.in_patch_limit, m.in_patch_limit_each_frame, m.in_patch_limit_video) == (16384, 4096, None)
    assert (m.sample_fps, m.timestamp_mode) == (2.0, "hh:mm:ss.fff")


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k25"])
def test_absent_media_keys_common_to_both_families(family: str) -> None:
    m = parse(family).media
    assert (m.patch_size, m.merge_kernel_size, m.patch_limit_on_one_side) == (14, 2, 512)
    assert m.temporal_merge_kernel_size == 4
    assert m.image_mean == m.image_std == (0.5, 0.5, 0.5)


def test_the_architecture_follows_the_keys_not_the_family() -> None:
    v = parse(
        "kimi_k3",
        {"norm_type": "layernorm", "mm_projector_type": "patchmerger", "pos_emb_interpolation_mode": "bicubic"},
    ).vision
    assert (v.norm_type, v.norm_eps) == ("layernorm", 1e-5)
    assert (v.mm_projector_type, v.pos_emb_interpolation_mode) == ("patchmerger", "bicubic")
    assert v.attn_bias is False


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k25"])
def test_null_attention_width_is_the_tower_width(family: str) -> None:
    v = parse(family, {"vt_hidden_size": 256, "qkv_hidden_size": None, "vt_num_attention_heads": 8}).vision
    assert (v.qkv_hidden_size, v.head_dim) == (256, 32)


def test_attention_width_of_its_own() -> None:
    v = parse("kimi_k25", {"vt_hidden_size": 64, "qkv_hidden_size": 96, "vt_num_attention_heads": 3}).vision
    assert (v.qkv_hidden_size, v.head_dim) == (96, 32)


@pytest.mark.parametrize("value", [None, 1024])
def test_projector_input_width_may_repeat_the_tower_width(value: int | None) -> None:
    assert parse("kimi_k3", {"mm_hidden_size": value}).vision.hidden_size == 1024


def test_unknown_keys_are_ignored() -> None:
    extended = parse("kimi_k3", {"chunk_size_feed_forward": 0}, {"config_type": "anything"}, architectures=["Any"])
    assert extended == parse("kimi_k3")


def test_activation_names_are_ignored_as_the_reference_ignores_them() -> None:
    assert parse("kimi_k3", {"activation_func": "relu", "projector_hidden_act": "silu"}) == parse("kimi_k3")


def test_token_id_is_read_from_the_top_level() -> None:
    assert parse(media_placeholder_token_id=7).media_placeholder_token_id == 7


def test_with_norm_eps_changes_nothing_else() -> None:
    config = parse("kimi_k3")
    changed = config.with_norm_eps(2.0**-7)
    assert changed.vision.norm_eps == 0.0078125
    same = [f.name for f in fields(config.vision) if f.name != "norm_eps"]
    assert [getattr(changed.vision, name) for name in same] == [getattr(config.vision, name) for name in same]
    assert changed.media == config.media


@pytest.mark.parametrize("value", ["kimi_vl", None, 3, ["kimi_k3"]])
def test_another_model_type_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match=r"^model: .*model_type") as error:
        parse_config({"model_type": value}, None, source="model")
    assert "kimi_k3, kimi_k25" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_type", "batchnorm"),
        ("norm_type", None),
        ("pos_emb_type", "rope_only"),
        ("pos_emb_interpolation_mode", "nearest"),
        ("merge_type", "avg"),
        ("mm_projector_type", "mlp"),
        ("mlp_type", "mlp3"),
        ("merge_kernel_size", [2, 1]),
        ("merge_kernel_size", 2),
        ("vt_hidden_size", 0),
        ("vt_hidden_size", 1024.0),
        ("vt_hidden_size", "1024"),
        ("vt_hidden_size", 1023),
        ("qkv_hidden_size", -1536),
        ("vt_num_attention_heads", True),
        ("vt_num_hidden_layers", None),
        ("vt_intermediate_size", 0),
        ("patch_size", 0),
        ("init_pos_emb_height", 0),
        ("init_pos_emb_width", 0),
        ("init_pos_emb_time", 0),
        ("text_hidden_size", 0),
        ("mm_hidden_size", 1152),
        ("attn_bias", 1),
        ("linear_bias", "false"),
        ("patch_embed_proj_bias", None),
        ("projector_ln_eps", math.nan),
        ("projector_ln_eps", "1e-5"),
    ],
)
def test_vision_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match=rf"^model: config\.json: vision_config\.{key} "):
        parse("kimi_k3", {key: value})


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (1536, 7),  # not divisible
        (60, 10),  # heads of 6 channels: no two pairs for each axis of the rotation
    ],
)
def test_attention_width_that_does_not_divide_is_refused(width: int, heads: int) -> None:
    with pytest.raises(CheckpointMismatch, match=f"{width} attention channels over {heads} heads"):
        parse("kimi_k3", {"qkv_hidden_size": width, "vt_num_attention_heads": heads})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 0),
        ("merge_kernel_size", [2, 2]),
        ("in_patch_limit", None),
        ("in_patch_limit", 0),
        ("patch_limit_on_one_side", 0),
        ("sample_fps", 10**400),
        ("image_mean", [1e300, 0.5, 0.5]),
        ("image_std", [1e-45, 0.5, 0.5]),
        ("fixed_output_tokens", 64),
        ("in_patch_limit_each_frame", 0),
        ("in_patch_limit_video", 0.5),
        ("sample_fps", 0),
        ("sample_fps", -2.0),
        ("sample_fps", math.inf),
        ("temporal_merge_kernel_size", 0),
        ("timestamp_mode", "ss"),
        ("image_mean", [0.5, 0.5]),
        ("image_mean", [0.5, 0.5, "0.5"]),
        ("image_std", 0.5),
        ("image_std", [0.5, 0.5, 0.0]),
    ],
)
def test_media_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match=rf"^model: preprocessor_config\.json: media_proc_cfg\.{key} "):
        parse("kimi_k25", media={key: value})


@pytest.mark.parametrize("section", [None, [], "text"])
def test_sections_must_be_objects(section: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="vision_config must be an object"):
        parse_config({"model_type": "kimi_k3", "vision_config": section}, {"media_proc_cfg": {}}, source="model")
    with pytest.raises(CheckpointMismatch, match="media_proc_cfg must be an object"):
        parse_config({"model_type": "kimi_k3"}, {"media_proc_cfg": section}, source="model")


@pytest.mark.parametrize("value", [None, "163605", 0])
def test_token_id_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="media_placeholder_token_id"):
        parse(media_placeholder_token_id=value)


@pytest.mark.parametrize("media", [{"patch_size": 16}, {"merge_kernel_size": 4}])
def test_the_two_files_must_agree_on_patches(media: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch, match="they must agree"):
        parse(media=media)


def test_chunks_longer_than_the_time_table_are_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="temporal_merge_kernel_size 5 exceeds the 4 rows"):
        parse(media={"temporal_merge_kernel_size": 5})
    assert parse(vision={"init_pos_emb_time": 5}, media={"temporal_merge_kernel_size": 5}).vision.pos_emb_time == 5


def test_sides_beyond_the_rotary_table_are_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="patch_limit_on_one_side 513 exceeds the 512 positions"):
        parse(media={"patch_limit_on_one_side": 513})


def test_frames_without_a_limit_take_that_of_one_image() -> None:
    assert parse("kimi_k25", media={"in_patch_limit_each_frame": None}).media.in_patch_limit_each_frame == 16384


def test_the_released_background_is_the_default_chessboard() -> None:
    released = {key: value for key, value in FAMILY_MEDIA["kimi_k3"].items() if key.startswith("transparent_bg")}
    # The keys decide, so a K2.5 checkpoint that has them gets the background too.
    assert parse("kimi_k25", media=released).media.transparent_background == Chessboard(8, True, 255, 180)


def test_background_takes_the_values_given() -> None:
    board = {
        "pattern": "chessboard",
        "chessboard_square_size": 4,
        "chessboard_square_on_top_left": False,
        "chessboard_white_value": 200,
        "chessboard_gray_value": 0,
    }
    media = {"transparent_bg_config": board, "transparent_bg_fill_stage": "after_resize"}
    assert parse(media=media).media.transparent_background == Chessboard(4, False, 200, 0)


@pytest.mark.parametrize("media", [{}, {"transparent_bg_config": None, "transparent_bg_fill_stage": None}])
def test_without_both_background_keys_there_is_none_in_either_family(media: dict[str, Any]) -> None:
    assert parse("kimi_k3", media=media).media.transparent_background is None
    assert parse("kimi_k25", media=media).media.transparent_background is None


BOARD = {"pattern": "chessboard"}


@pytest.mark.parametrize(
    ("board", "stage", "named"),
    [
        (BOARD, None, "transparent_bg_fill_stage"),
        (BOARD, "before_resize", "transparent_bg_fill_stage"),
        (None, "after_resize", "transparent_bg_config"),
        ({"pattern": "white"}, "after_resize", "transparent_bg_config"),
        ({}, "after_resize", "transparent_bg_config"),
        ("chessboard", "after_resize", "transparent_bg_config"),
        (BOARD | {"chessboard_white_value": 256}, "after_resize", "transparent_bg_config"),
        (BOARD | {"chessboard_gray_value": -1}, "after_resize", "transparent_bg_config"),
        (BOARD | {"chessboard_gray_value": 0.5}, "after_resize", "transparent_bg_config"),
        (BOARD | {"chessboard_square_size": 0}, "after_resize", "chessboard_square_size"),
    ],
)
def test_any_other_background_is_refused(board: Any, stage: Any, named: str) -> None:
    with pytest.raises(CheckpointMismatch, match=named):
        parse(media={"transparent_bg_config": board, "transparent_bg_fill_stage": stage})


def test_without_a_preprocessor_file_the_released_values_are_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config({"model_type": "kimi_k3"}, None, source="model")
    assert config.media.in_patch_limit == 65536
    assert config.media.transparent_background == Chessboard()
    assert "model has no preprocessor_config.json" in caplog.text
