"""What the Dockerfile and the compose files name exists: extras, options, variables. No image is built here."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
FILES = sorted((ROOT / "deploy").glob("compose*.yaml"))


def service(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]["moonvit"]
    return found


def test_the_images_variables_are_options() -> None:
    named = re.findall(rf"\b{PREFIX}([A-Z_]+)", DOCKERFILE)
    assert {"HOST", "PORT", "CONTROL_PORT"} <= set(named)
    assert {name.lower() for name in named} <= set(Settings.model_fields)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_arguments_of_the_build_are_known_and_extras_exist(path: Path) -> None:
    known = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    args = service(path)["build"]["args"]
    assert set(args) <= known
    default = re.search(r'^ARG EXTRAS="(.+)"$', DOCKERFILE, re.MULTILINE)
    assert default is not None
    for extra in args.get("EXTRAS", default[1]).split(","):
        assert extra in EXTRAS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_has_options_that_exist(path: Path) -> None:
    options = [word for word in service(path)["command"] if word.startswith("--")]
    assert options
    assert {option.removeprefix("--").replace("-", "_") for option in options} <= set(Settings.model_fields)


def test_the_file_for_gpus_adds_to_the_other() -> None:
    plain, gpu = (service(ROOT / "deploy" / name) for name in ("compose.yaml", "compose.gpu.yaml"))
    assert plain["read_only"]
    assert "read_only" not in gpu
    (volume,) = gpu["volumes"]
    kept = volume.partition(":")[2]
    assert all(value.startswith(f"{kept}/") for value in gpu["environment"].values())
    assert f"-o 10001 {kept}" in DOCKERFILE
