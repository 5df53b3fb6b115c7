"""The released configuration of each family, as data: what an absent key of a checkpoint's JSON files means."""

from typing import Any, Literal

Family = Literal["kimi_k3", "kimi_k25"]

# `activation_func` and `projector_hidden_act` are missing on purpose: the reference ignores both and always takes the
# tanh GELU in the blocks and the erf GELU in the projector.
_COMMON = {
    "patch_size": 14,
    "vt_num_hidden_layers": 27,
    "mlp_type": "mlp2",
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}

# What an absent key means is a property of the family (its released configuration class), not of the architecture.
FAMILY_VISION: dict[Family, dict[str, Any]] = {
    "kimi_k3": _COMMON
    | {
        "vt_hidden_size": 1024,
        "qkv_hidden_size": 1536,
        "vt_num_attention_heads": 12,
        "vt_intermediate_size": 4096,
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "pos_emb_interpolation_mode": "bilinear",
        "mm_projector_type": "patchmergerv2",
    },
    "kimi_k25": _COMMON
    | {
        "vt_hidden_size": 1152,
        "qkv_hidden_size": None,  # as vt_hidden_size
        "vt_num_attention_heads": 16,
        "vt_intermediate_size": 4304,
        "norm_type": "layernorm",
        "attn_bias": True,
        "linear_bias": True,
        "patch_embed_proj_bias": True,
        "pos_emb_interpolation_mode": "bicubic",
        "mm_projector_type": "patchmerger",
    },
}

_MEDIA_COMMON = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

# The released preprocessor files, whole: used where a checkpoint directory has none, and by the demo models.
FAMILY_MEDIA: dict[Family, dict[str, Any]] = {
    "kimi_k3": _MEDIA_COMMON
    | {
        "in_patch_limit": 65536,
        "in_patch_limit_each_frame": 16384,
        "in_patch_limit_video": 655360,
        "sample_fps": 8.0,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
        "transparent_bg_fill_stage": "after_resize",
    },
    "kimi_k25": _MEDIA_COMMON
    | {
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
    },
}
