"""Encode the bundled photo and clip through a running service and print what came back, for a person to read."""

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ((ROOT / "samples" / "photo.jpg", "image/jpeg"), (ROOT / "samples" / "clip.mp4", "video/mp4"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url
    with httpx.Client(base_url=url, timeout=120) as client:
        for path, media_type in SAMPLES:
            response = client.post(
                "/v1/encode",
                content=path.read_bytes(),
                headers={"Content-Type": media_type, "Accept": "application/vnd.safetensors"},
            )
            if not response.is_success:
                print(f"{path.name}: status {response.status_code}: {response.text}", file=sys.stderr)
                return 1
            show(path, media_type, response.content)
        show_service(client.get("/v1/info").raise_for_status().json())
    show_commands(url)
    return 0


def show(path: Path, media_type: str, body: bytes) -> None:
    """One answer: a safetensors file whose header carries the JSON part."""
    (header_bytes,) = struct.unpack("<Q", body[:8])
    answer = json.loads(json.loads(body[8 : 8 + header_bytes])["__metadata__"]["response"])
    item, timing = answer["data"][0], answer["timing_ms"]
    width, height = item["original_size"]
    grids = item["grid_thw"]
    print(f"\nPOST /v1/encode with {path.relative_to(ROOT)} ({path.stat().st_size:,} bytes of {media_type})")
    line("media", f"{item['type']} of {width} x {height} pixels" + frames(item))
    line(
        "grid",
        f"{len(grids)} segment{'s' * (len(grids) > 1)} of "
        + ", ".join(dict.fromkeys(" x ".join(map(str, g)) for g in grids)),
    )
    line("", "(frames x rows x columns, in patches of 14 x 14 pixels)")
    line("tokens", f"{item['num_tokens']}, from {answer['usage']['patches']} patches")
    line("embedding", describe(load(body)["embeddings"]))
    line("prompt", item["prompt"] if len(item["prompt"]) < 90 else item["prompt"][:87] + "...")
    line("key", item["key"])
    line("timings", ", ".join(f"{stage} {ms:.1f} ms" for stage, ms in timing.items()))


def frames(item: dict[str, Any]) -> str:
    if item["type"] == "image":
        return ""
    indices = item["frame_indices"]
    return f", {len(indices)} frames sampled (from number {indices[0]} to {indices[-1]})"


def describe(embeddings: Tensor) -> str:
    first = " ".join(f"{value:.3f}" for value in embeddings[0, :5].tolist())
    return f"{tuple(embeddings.shape)} {str(embeddings.dtype).removeprefix('torch.')}, first values {first} ..."


def show_service(info: dict[str, Any]) -> None:
    model, attention = info["model"], info["attention"]
    print(f"\nServed by moonvit-serve {info['version']}")
    line("model", f"{model['name']} from {model['source']}")
    if model["demo_weights"]:
        line("", "DEMO weights: the architecture is real, the numbers are made up and mean nothing")
    line("runs on", f"{info['device']} in {info['dtype']}")
    error = attention["self_test"][attention["selected"]]
    line("attention", f"{attention['selected']} (asked: {attention['configured']}), self-test error {error:.1e}")


def show_commands(url: str) -> None:
    print("\nTry it yourself:")
    print(
        f"  curl -s {url}/v1/encode -H 'Content-Type: image/jpeg' --data-binary @samples/photo.jpg | head -c 600; echo"
    )
    print(f"  curl {url}/v1/encode -F 'file=@samples/photo.jpg' -F 'file=@samples/clip.mp4;type=video/mp4' \\")
    print("       -H 'Accept: application/vnd.safetensors' -o out.safetensors")
    print(f"  curl {url}/v1/info")
    print(f"  curl {url}/openapi.json, or read docs/api.md, for the whole interface\n")


def line(label: str, text: str) -> None:
    print(f"  {label:<10} {text}")


if __name__ == "__main__":
    sys.exit(main())
