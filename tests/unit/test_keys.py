"""Keys: the vectors of docs/api.md, and what a key must and must not depend on."""

import hashlib
import re
from pathlib import Path

from app.decode import MediaOptions
from app.keys import embedding_key, preprocessing_id
from encoder import load_config

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
MEDIA = hashlib.sha256(b"moonvit").hexdigest()
MODEL = {"fingerprint": "ab" * 32, "preprocessing": "1-0123456789abcdef"}


def test_the_documented_vectors() -> None:
    """Every vector in the documentation is computed here, from the lines printed beside it."""
    vectors = re.findall(r"```text\n(moonvit-embedding/1\n.*?)```\n+`(emb-[0-9a-f]{64})`", DOCS.read_text(), re.DOTALL)
    assert len(vectors) == 2
    documented = {key for _, key in vectors}
    for lines, key in vectors:
        assert "emb-" + hashlib.sha256(lines.encode()).hexdigest() == key
    assert documented == {
        embedding_key(MEDIA, "image", MediaOptions(), **MODEL),
        embedding_key(MEDIA, "video", MediaOptions(fps=2.0, max_frames=64), **MODEL),
    }


def test_every_part_changes_the_key() -> None:
    base = embedding_key(MEDIA, "video", MediaOptions(), **MODEL)
    others = {
        embedding_key("0" * 64, "video", MediaOptions(), **MODEL),
        embedding_key(MEDIA, "image", MediaOptions(), **MODEL),
        embedding_key(MEDIA, "video", MediaOptions(fps=2.0), **MODEL),
        embedding_key(MEDIA, "video", MediaOptions(max_frames=2), **MODEL),
        embedding_key(MEDIA, "video", MediaOptions(allow_partial=True), **MODEL),
        embedding_key(MEDIA, "video", MediaOptions(), **MODEL | {"fingerprint": "cd" * 32}),
        embedding_key(MEDIA, "video", MediaOptions(), **MODEL | {"preprocessing": "2-0"}),
    }
    assert len(others) == 7
    assert base not in others


def test_options_of_the_other_kind_do_not_matter() -> None:
    film_options = MediaOptions(fps=2.0, max_frames=4, allow_partial=True)
    assert embedding_key(MEDIA, "image", film_options, **MODEL) == embedding_key(
        MEDIA, "image", MediaOptions(), **MODEL
    )
    assert embedding_key(MEDIA, "video", MediaOptions(apply_exif_orientation=True), **MODEL) == embedding_key(
        MEDIA, "video", MediaOptions(), **MODEL
    )


def test_preprocessing_is_named_by_version_and_settings() -> None:
    k3, k25 = (preprocessing_id(load_config(spec)) for spec in ("demo:k3-tiny", "demo:k25-tiny"))
    assert k3 == preprocessing_id(load_config("demo:k3"))
    assert k3 != k25
    assert re.fullmatch(r"1-[0-9a-f]{16}", k3)
