"""`moonvit-serve`: serve, encode, backends, info, export, doctor. Parses, dispatches, and turns errors into exit codes.

Exit codes: 0 done; 1 some file failed, or the doctor found a problem; 2 the command or configuration cannot work;
130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from app.commands.flags import add_settings_flags, given_settings
from app.logs import configure_logging
from encoder import EncoderError

EXIT_SETUP = 2
EXIT_INTERRUPTED = 130

# The settings that choose and place a model, for the commands that load one.
MODEL_SETTINGS = ("model", "device", "attention_backend", "rms_norm_eps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, never raised (except by argparse for `--help` and bad usage)."""
    args = build_parser().parse_args(argv)
    configure_logging("warning", "console")  # `serve` sets its own
    try:
        code: int = args.run(args)
    except EncoderError as error:
        print(f"moonvit-serve: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_SETUP
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moonvit-serve",
        description="Encode images and videos with the MoonViT3d vision encoder.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"moonvit-serve {version('moonvit-serve')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {description}", allow_abbrev=False
        )

    serve = command(
        "serve",
        "answer requests over HTTP",
        "Every option can also be set by a variable: --max-items by MOONVIT_MAX_ITEMS, and so on; a flag wins. "
        "[Brackets] hold what is used without.",
    )
    add_settings_flags(serve)
    serve.set_defaults(run=_serve)

    encode = command(
        "encode", "encode files and write the embeddings to one safetensors file", "In this process, or with --url."
    )
    encode.add_argument("files", nargs="+", type=Path, metavar="FILE", help="pictures and films")
    encode.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="safetensors file to write")
    encode.add_argument("-f", "--force", action="store_true", help="replace the output file if it exists")
    encode.add_argument("--url", help="send the files to the service at this address, e.g. http://127.0.0.1:8000")
    encode.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key for that service")
    encode.add_argument("--kind", choices=("image", "video"), help="what the files are [decided by their bytes]")
    encode.add_argument("--fps", type=float, help="frames sampled per second of film [the model's own rate]")
    encode.add_argument("--max-frames", type=int, metavar="INT", help="frames sampled at most, over the whole film")
    encode.add_argument("--allow-partial", action="store_true", help="keep the frames that decode of a damaged film")
    encode.add_argument("--apply-exif-orientation", action="store_true", help="turn pictures as their EXIF tag says")
    encode.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="type of the numbers written [bfloat16]",
    )
    add_settings_flags(encode.add_argument_group("model, without --url"), (*MODEL_SETTINGS, "quantization"))
    encode.set_defaults(run=_encode)

    backends = command(
        "backends", "show which attention backends work here", "Runs the self-test of each; reads no weights."
    )
    backends.add_argument("--bench", action="store_true", help="also measure them on mixes of segments, half a minute")
    backends.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    add_settings_flags(backends, (*MODEL_SETTINGS, "dtype"))
    backends.set_defaults(run=_backends)

    info = command("info", "show a model's architecture, limits and costs", "Reads no weights.")
    info.add_argument("model", metavar="MODEL", help="checkpoint directory or demo spec")
    info.set_defaults(run=_info)

    export = command("export", "write a model's vision part as a checkpoint directory", "Also of the demo models.")
    export.add_argument("model", metavar="MODEL", help="checkpoint directory or demo spec")
    export.add_argument("directory", type=Path, metavar="DIR", help="directory to create")
    export.set_defaults(run=_export)

    doctor = command(
        "doctor",
        "look for what would keep `serve` from working",
        "Give it the options of `serve`; loads no weights. Exits with 1 if there is a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="findings as one JSON document")
    add_settings_flags(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


# Each command imports what it needs: `info` should load neither FastAPI nor a film decoder.


def _serve(args: argparse.Namespace) -> int:
    from app.main import serve
    from app.settings import load_settings

    return serve(load_settings(given_settings(args)))


def _encode(args: argparse.Namespace) -> int:
    from app.commands.encode import encode_files

    return encode_files(args)


def _backends(args: argparse.Namespace) -> int:
    from app.commands.backends import show_backends
    from app.settings import load_settings

    return show_backends(load_settings(given_settings(args)), bench=args.bench, as_json=args.json)


def _info(args: argparse.Namespace) -> int:
    from app.commands.models import show_info

    return show_info(args.model)


def _export(args: argparse.Namespace) -> int:
    from app.commands.models import export

    return export(args.model, args.directory)


def _doctor(args: argparse.Namespace) -> int:
    from app.commands.doctor import diagnose
    from app.settings import load_settings

    return diagnose(load_settings(given_settings(args)), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
