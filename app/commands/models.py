"""`moonvit-serve info` and `export`: what can be said about a model without serving it."""

from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from encoder import EncoderConfig, flops, largest_segment, load_config, num_tokens
from encoder.export import export_checkpoint
from encoder.grid import plan_frames, plan_image
from encoder.model import MoonViT3d

# (width, height, frames) of the pictures and film chunks whose cost `info` shows
COMMON_SIZES = (
    (224, 224, 1),
    (448, 448, 1),
    (1024, 1024, 1),
    (1920, 1080, 1),
    (4000, 3000, 1),
    (640, 360, 4),
    (1280, 720, 4),
    (1920, 1080, 4),
)


def show_info(model: str) -> int:
    """Print a model's architecture, limits and costs, from its two JSON files alone."""
    config = load_config(model)
    console = Console()
    weights = "[yellow]demo weights: what they encode means nothing[/]" if config.is_demo else "a checkpoint's weights"
    console.print(f"[bold]{config.source}[/]: {config.family}, {weights}")
    console.print(_architecture(config))
    console.print(_limits(config))
    console.print(_costs(config))
    return 0


def _architecture(config: EncoderConfig) -> Table:
    v = config.vision
    with torch.device("meta"):
        model = MoonViT3d(config)
    tower, projector = (sum(p.numel() for p in part.parameters()) for part in (model.vision_tower, model.mm_projector))
    table = Table(title="architecture", title_justify="left", show_header=False, box=SIMPLE_HEAD)
    rows = {
        "parameters": f"{tower:,} tower + {projector:,} projector, {(tower + projector) * 2 / 1e6:,.1f} MB in bfloat16",
        "blocks": f"{v.num_layers}",
        "width": f"{v.hidden_size}, MLP {v.intermediate_size}, output {v.text_hidden_size}",
        "attention": f"{v.num_heads} heads of {v.head_dim} = {v.qkv_hidden_size} channels",
        "norm": f"{v.norm_type}, epsilon {v.norm_eps:.3g}",
        "biases": f"attention {_yes(v.attn_bias)}, MLP {_yes(v.linear_bias)}, patches {_yes(v.patch_embed_proj_bias)}",
        "patch": f"{v.patch_size} pixels a side, {v.merge_kernel_size[0]}x{v.merge_kernel_size[1]} patches a token",
        "positions": f"{v.pos_emb_height}x{v.pos_emb_width} table, {v.pos_emb_interpolation_mode}",
        "projector": v.mm_projector_type,
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _limits(config: EncoderConfig) -> Table:
    m = config.media
    side_px = m.patch_limit_on_one_side * m.patch_size
    film = "no limit" if m.in_patch_limit_video is None else f"{m.in_patch_limit_video:,} patches a chunk"
    title = "limits of the preprocessing (larger media is scaled down)"
    table = Table(title=title, title_justify="left", show_header=False, box=SIMPLE_HEAD)
    rows = {
        "picture": f"{m.in_patch_limit:,} patches, {side_px:,} pixels a side",
        "film": f"{m.in_patch_limit_each_frame:,} patches a frame, {film}",
        "film sampling": f"{m.sample_fps:g} frames per second, {m.temporal_merge_kernel_size} frames a chunk",
        "largest segment": f"{largest_segment(m):,} patches (with padding)",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _costs(config: EncoderConfig) -> Table:
    table = Table(title="costs", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("media in pixels")
    for column in ("grid t,h,w", "patches", "tokens", "GFLOP", "bfloat16 MB"):
        table.add_column(column, justify="right")
    for width, height, frames in COMMON_SIZES:
        plan = plan_image if frames == 1 else partial(plan_frames, num_frames=frames)
        grid = plan(width, height, media=config.media).grid(frames)
        tokens = num_tokens(grid, config)
        table.add_row(
            f"{width}x{height}" if frames == 1 else f"{frames} x {width}x{height}",
            ",".join(map(str, grid)),
            f"{grid.num_patches:,}",
            f"{tokens:,}",
            f"{flops(grid, config) / 1e9:,.1f}",
            f"{tokens * config.vision.text_hidden_size * 2 / 1e6:,.1f}",
        )
    return table


def export(model: str, directory: Path) -> int:
    """Write the model's vision part as a checkpoint directory, with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"writing {directory}", total=None)
        export_checkpoint(model, directory, progress=lambda done, total: bar.update(task, completed=done, total=total))
    Console().print(f"{directory} holds {model}; serve it with: moonvit-serve serve --model {directory}")
    return 0


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
