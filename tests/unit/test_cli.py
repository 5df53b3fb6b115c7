import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from PIL import Image
from safetensors.torch import load_file

from app.cli import main
from app.commands.flags import options
from app.main import create_app
from app.settings import PREFIX, Settings, load_settings
from encoder import Engine, load_config, preprocess_image

SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of the machine, wide lines, and pytest's own logging left in place."""
    for name in list(os.environ):
        if name.upper().startswith(PREFIX) or name == "SGLANG_MM_ATTENTION_BACKEND":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("MOONVIT_FILM_WORKERS", "1")
    monkeypatch.setattr("app.cli.configure_logging", lambda level, log_format: None)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((60, 40)).convert("RGB").save(path)  # padded to 84 x 56: 4 x 6 patches
    return path


def read_output(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    response = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["response"])
    return load_file(path), response


def words(text: str) -> str:
    """The text on one line: argparse and rich break lines as they see fit."""
    return " ".join(text.split())


class TestHelp:
    @pytest.mark.parametrize("name", list(Settings.model_fields))
    def test_shows_default_and_unit_of_every_option(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--help"])
        assert caught.value.code == 0
        (option,) = options([name])
        flag, _, rest = words(capsys.readouterr().out).partition(f" {option.description}")
        assert option.flag in flag.rpartition("options:")[2].rpartition("]")[2]
        has_default = Settings.model_fields[name].default not in (None, ())
        assert rest.startswith(" [") == has_default

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("port", "port to listen on; 0 takes a free one [8000]"),
            ("max_body_bytes", "bytes of a request body [256 MiB]"),
            ("film_deadline_s", "seconds one film may take to decode [60.0]"),
            ("allow_private_media", "fetch from private and loopback addresses too [no]"),
            (
                "max_batch_patches",
                "patches in one batch; a segment that has more runs alone [the largest legal segment, 71424 for "
                "Kimi-K3, or what fits into the GPU's free memory]",
            ),
        ],
    )
    def test_reads_like_this(self, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["serve", "--help"])
        assert f" {text} " in words(capsys.readouterr().out)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--version"])
        assert capsys.readouterr().out == "moonvit-serve 0.1.0\n"


class TestServe:
    def test_passes_only_the_flags_that_were_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Settings] = []
        monkeypatch.setattr("app.main.serve", lambda settings: seen.append(settings) or 0)
        monkeypatch.setenv("MOONVIT_MAX_ITEMS", "5")
        monkeypatch.setenv("MOONVIT_PORT", "9001")
        assert main(["serve", "--port", "9002", "--allow-private-media", "--allowed-media-domains", "a.example"]) == 0
        (settings,) = seen
        assert (settings.port, settings.max_items, settings.allow_private_media) == (9002, 5, True)
        assert settings.allowed_media_domains == ("a.example",)

    def test_hands_on_the_exit_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.main.serve", lambda settings: 7)
        assert main(["serve"]) == 7

    def test_ctrl_c_is_130(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(settings: Settings) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("app.main.serve", interrupted)
        assert main(["serve"]) == 130

    def test_an_unknown_flag_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--prot", "1"])
        assert caught.value.code == 2
        assert "unrecognized arguments: --prot 1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "variables", "message"),
        [
            ([], {"MOONVIT_PROT": "1"}, "variable MOONVIT_PROT names no option; did you mean MOONVIT_PORT?"),
            (["--port", "x"], {}, "--port (or MOONVIT_PORT): "),
            (["--model", "/nowhere"], {}, "/nowhere is neither a checkpoint directory nor a demo model"),
            (["--model", "demo:k4"], {}, "no demo model 'demo:k4'"),
            (
                ["--attention-backend", "torch_native"],
                {},
                "Unsupported Kimi-K3 vision attention backend: torch_native\nChoose auto or one of: ",
            ),
        ],
    )
    def test_what_cannot_work_is_one_message_and_exit_code_2(
        self,
        argv: list[str],
        variables: dict[str, str],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("app.main.configure_logging", lambda level, log_format: None)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["serve", *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"moonvit-serve: error: {message}")
        assert "Traceback" not in error

    def test_the_installed_command_exits_with_the_code(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "serve", "--attention-backend", "spda"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("moonvit-serve: error: Unsupported Kimi-K3 vision attention backend: spda\n")
        assert "Did you mean sdpa?" in done.stderr


class TestEncode:
    def test_samples_become_one_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        photo, clip, output = SAMPLES / "photo.jpg", SAMPLES / "clip.mp4", tmp_path / "out.safetensors"
        assert main(["encode", str(photo), str(clip), "-o", str(output), "--dtype", "float32"]) == 0
        tensors, response = read_output(output)
        image, video = response["data"]
        assert (image["type"], image["index"], video["type"], video["index"]) == ("image", 0, "video", 1)
        offsets = tensors["token_offsets"].tolist()
        assert offsets == [0, image["num_tokens"], image["num_tokens"] + video["num_tokens"]]
        assert tensors["embeddings"].shape == (offsets[-1], 256)

        engine = Engine.load("demo:k3-tiny")
        with Image.open(photo) as picture:
            (expected,) = engine.encode([preprocess_image(picture, engine.config)])
        torch.testing.assert_close(tensors["embeddings"][: offsets[1]], expected, rtol=0, atol=1e-5)

        said = capsys.readouterr().err
        assert "demo:k3-tiny (DEMO weights: the embeddings mean nothing)" in said
        assert f"{photo}: image " in said
        assert f"{image['num_tokens']} tokens" in said
        assert "2 of 2 files" in said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors"]

    def test_a_bad_file_is_reported_and_the_others_are_kept(
        self, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken, absent, output = tmp_path / "broken.jpg", tmp_path / "absent.jpg", tmp_path / "out.safetensors"
        broken.write_bytes(b"no picture")
        files = [str(broken), str(picture), str(absent)]
        assert main(["encode", *files, "-o", str(output)]) == 1
        tensors, response = read_output(output)
        assert [entry["object"] for entry in response["data"]] == ["error", "embedding", "error"]
        assert response["data"][0]["error"]["code"] == "unsupported_media"
        assert response["usage"]["items"] == 3
        assert tensors["token_offsets"].tolist() == [0, 0, 6, 6]
        assert tensors["embeddings"].dtype == torch.bfloat16
        said = capsys.readouterr().err
        assert f"{broken}: FAILED: 10 bytes that are no picture or film we read" in said
        assert f"{absent}: FAILED: cannot be read: No such file or directory" in said
        assert "1 of 3 files, 6 tokens" in said

    def test_nothing_is_written_when_every_file_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = tmp_path / "out.safetensors"
        assert main(["encode", str(tmp_path / "absent.jpg"), "-o", str(output)]) == 1
        assert not output.exists()
        assert "nothing was written" in capsys.readouterr().err

    def test_an_existing_file_is_only_replaced_with_force(
        self, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "out.safetensors"
        output.write_text("precious")
        assert main(["encode", str(picture), "-o", str(output)]) == 2
        assert capsys.readouterr().err == f"moonvit-serve: error: {output} exists; -f replaces it\n"
        assert output.read_text() == "precious"
        assert main(["encode", str(picture), "-o", str(output), "-f"]) == 0
        assert read_output(output)[1]["usage"]["tokens"] == 6

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["-o", "{tmp}"], "is a directory, the name of a file is needed"),
            (["-o", "{tmp}/absent/out.safetensors"], "absent is not a directory"),
            (["-o", "{tmp}/out", "--fps", "-1"], "fps: Input should be greater than 0"),
            (["-o", "{tmp}/out", "--max-frames", "0"], "max_frames: Input should be greater than or equal to 1"),
            (
                ["-o", "{tmp}/out", "--url", "http://127.0.0.1:9", "--attention-backend", "sdpa"],
                "--attention-backend cannot be given with --url: the service has its own model",
            ),
            (["-o", "{tmp}/out", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer: "),
            (["-o", "{tmp}/out", "--model", "demo:k4"], "no demo model 'demo:k4'"),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, argv: list[str], message: str, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["encode", str(picture), *(word.format(tmp=tmp_path) for word in argv)]) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]

    def test_media_options_reach_the_decoder(self, tmp_path: Path) -> None:
        output = tmp_path / "out.safetensors"
        turned = tmp_path / "turned.jpg"
        exif = Image.Exif()
        exif[0x0112] = 6  # orientation: a quarter turn
        Image.new("RGB", (60, 40)).save(turned, exif=exif)
        assert main(["encode", str(turned), "-o", str(output), "--apply-exif-orientation"]) == 0
        assert read_output(output)[1]["data"][0]["original_size"] == [40, 60]


@pytest.fixture
def service_url() -> Iterator[str]:
    """A service on a free port, whose embeddings are the row numbers of their segment."""
    settings = load_settings({"port": "0"})
    width = load_config(settings.model).vision.text_hidden_size

    def run(batch: Any) -> torch.Tensor:
        rows = torch.cat([torch.arange(count, dtype=torch.float32) for count in batch.num_tokens])
        return rows[:, None].expand(-1, width)

    config = uvicorn.Config(create_app(settings, run), port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    started = threading.Event()
    original = server.startup

    async def startup(*args: Any, **kwargs: Any) -> None:
        await original(*args, **kwargs)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread.start()
    assert started.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


class TestEncodeOverHttp:
    def test_gives_the_same_file_as_the_service_answers(
        self, service_url: str, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken, output = tmp_path / "broken.jpg", tmp_path / "out.safetensors"
        broken.write_bytes(b"no picture")
        files = [str(picture), str(broken), str(picture)]
        assert main(["encode", *files, "-o", str(output), "--url", f"{service_url}/", "--dtype", "float32"]) == 1
        tensors, response = read_output(output)
        assert [entry["index"] for entry in response["data"]] == [0, 1, 2]
        assert tensors["token_offsets"].tolist() == [0, 6, 6, 12]
        assert tensors["embeddings"][:, 0].tolist() == [0, 1, 2, 3, 4, 5] * 2
        assert response["data"][0]["key"] == response["data"][2]["key"]
        assert response["data"][1]["error"]["code"] == "unsupported_media"
        assert response["data"][1]["error"]["detail"].startswith("input[1]: 10 bytes")
        said = capsys.readouterr().err
        assert f"kimi-k3 at {service_url} (DEMO weights" in said
        assert f"{broken}: FAILED: 10 bytes that are no picture" in said

    def test_kind_and_media_options_are_sent(
        self, service_url: str, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "out.safetensors"
        argv = ["encode", str(picture), "-o", str(output), "--url", service_url, "--kind", "video", "--fps", "2"]
        assert main(argv) == 1
        assert "a still picture (PNG) sent as a film" in capsys.readouterr().err

    def test_another_kind_of_service_is_refused(
        self, service_url: str, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = f"{service_url}/v1/info"
        assert main(["encode", str(picture), "-o", str(tmp_path / "out"), "--url", url]) == 2
        assert f"{url} answers, but not as moonvit-serve does" in capsys.readouterr().err


class TestModels:
    def test_info_shows_architecture_limits_and_costs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "demo:k3"]) == 0
        said = capsys.readouterr().out
        assert "demo weights" in said
        assert "401,214,464 tower + 46,144,512 projector" in said
        assert "12 heads of 128 = 1536 channels" in said
        assert "largest segment" in said
        (line,) = [line.split() for line in said.splitlines() if line.strip().startswith("1024x1024")]
        assert line == ["1024x1024", "1,74,74", "5,476", "1,369", "9,448.3", "19.6"]

    def test_export_writes_a_checkpoint_that_loads(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        directory = tmp_path / "exported"
        assert main(["export", "demo:k25-tiny", str(directory)]) == 0
        assert Engine.load(directory).weights_sha256 == Engine.load("demo:k25-tiny").weights_sha256
        assert main(["info", str(directory)]) == 0
        assert "kimi_k25" in capsys.readouterr().out
        assert main(["export", "demo:k25-tiny", str(directory)]) == 2
        assert "not an empty directory" in capsys.readouterr().err

    def test_backends_says_what_runs_here_and_why_the_rest_does_not(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert main(["backends", "--device", "cpu"]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = {line.split()[0]: line for line in lines if line.startswith("  ") and line.strip()}
        assert {"flashinfer", "flashinfer_cudnn", "fa3", "fa4", "triton", "sdpa", "reference"} <= set(rows)
        assert "no: needs an NVIDIA GPU, the device is cpu" in rows["flashinfer"]
        assert " yes " in rows["sdpa"]
        error = float(rows["sdpa"].split("yes")[1].split()[0])
        assert 0 < error < 1e-5
        assert rows["sdpa"].split()[1] == "*"

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--attention-backend", "eager"], "Unsupported Kimi-K2.5 vision attention backend: eager"),
            (["--attention-backend", "flashinfer"], "Attention backend flashinfer cannot run here"),
            (["--device", "tpu"], "--device 'tpu' is no device"),
        ],
    )
    def test_backends_refuses_what_serve_would(
        self, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["backends", "--model", "demo:k25-tiny", "--device", "cpu", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"moonvit-serve: error: {message}")
