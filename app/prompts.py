"""Placeholder text of an item in the language model's prompt , as the released processors write it."""

from collections.abc import Sequence

from encoder import EncoderConfig

_PAD = "<|media_content|><|media_pad|><|media_end|>"


def image_prompt(original_size: tuple[int, int], config: EncoderConfig) -> str:
    """Kimi-K3 is told the picture's decoded width and height, K2.5 is not."""
    size = f" {original_size[0]}x{original_size[1]}" if config.family == "kimi_k3" else ""
    return f"<|media_begin|>image{size}{_PAD}"


def video_prompt(timestamps: Sequence[str]) -> str:
    """One placeholder per chunk, each after the time of its first frame."""
    return "".join(f"{timestamp}<|media_begin|>video{_PAD}" for timestamp in timestamps)
