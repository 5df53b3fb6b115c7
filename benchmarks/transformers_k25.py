"""The transformers library's own Kimi-K2.5 vision tower and projector, filled with our weights: the other side of the
CPU benchmark and of the cross-check in `tests/golden/test_transformers.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Kimi_K25Config, Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection, Kimi_K25VisionModel

from encoder import EncoderConfig, Grid


class TransformersK25(nn.Module):
    """Tower and projector; takes what `encoder.model.MoonViT3d` takes, but pixels already normalised."""

    def __init__(self, config: EncoderConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        vision = config.vision
        vision_config = Kimi_K25VisionConfig(
            patch_size=vision.patch_size,
            pos_emb_height=vision.pos_emb_height,
            pos_emb_width=vision.pos_emb_width,
            pos_emb_time=vision.pos_emb_time,
            num_attention_heads=vision.num_heads,
            num_hidden_layers=vision.num_layers,
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
        )
        whole = Kimi_K25Config(
            vision_config=vision_config,
            text_config={"model_type": "deepseek_v3", "hidden_size": vision.text_hidden_size},
            projection_hidden_size=vision.hidden_size,
            projection_layer_norm_eps=vision.projector_ln_eps,
        )
        # SDPA is this library's fastest CPU attention: one call a segment, no mask (eager forms whole score matrices).
        self.vision_tower = Kimi_K25VisionModel._from_config(vision_config, attn_implementation="sdpa")
        self.mm_projector = Kimi_K25MultimodalProjection(whole)
        self.load_state_dict(_renamed(weights, vision.num_heads), strict=True)
        self.eval().requires_grad_(False)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(L, 3, P, P) float32 normalised -> (M, E)."""
        merged = self.vision_tower(pixel_values, grid_thw=torch.tensor(grids)).pooler_output
        projected: Tensor = self.mm_projector(merged).squeeze(1)
        return projected


def _renamed(weights: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The released names and layout -> this library's: wqkv cut in three, RoPE pairs regrouped into halves."""
    renames = {
        "vision_tower.encoder.blocks.": "vision_tower.layers.",
        "vision_tower.encoder.final_layernorm": "vision_tower.final_layernorm",
        "pos_emb.weight": "pos_emb.position_embeddings",
        ".norm1.": ".norm2.",
        ".norm0.": ".norm1.",
        ".mlp.fc1.": ".mlp.fc2.",
        ".mlp.fc0.": ".mlp.fc1.",
        ".wo.": ".attn.proj.",
        "mm_projector.proj.0.": "mm_projector.in_proj.",
        "mm_projector.proj.2.": "mm_projector.out_proj.",
    }
    out = {}
    for name, tensor in weights.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        if ".wqkv." not in name:
            out[name] = tensor
            continue
        q, k, v = tensor.chunk(3)
        parts = {"q_proj": _pairs_to_halves(q, num_heads), "k_proj": _pairs_to_halves(k, num_heads), "v_proj": v}
        out |= {name.replace(".wqkv.", f".attn.{part}."): value for part, value in parts.items()}
    return out


def _pairs_to_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Within each head: channels (2p, 2p + 1) -> (p, p + Dh / 2)."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
