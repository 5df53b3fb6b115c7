"""The request parsers under atheris, a fuzzer that watches which branches an input reaches.

`python -m tests.fuzz.coverage_guided`, with libFuzzer's arguments: `-max_total_time=SECONDS`, `-runs=N` and others. An
input that ends in an exception a parser may not raise, in a failed check, or beyond the time limit ends the run with
another code than 0.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["app", "tests.fuzz.parsers"]):
    from tests.fuzz.parsers import PARSERS, SEEDS

NAMES = sorted(PARSERS)
ONE_INPUT_S = 10


def one_input(data: bytes) -> None:
    """The first byte chooses the parser, the rest is what it gets."""
    if data:
        PARSERS[NAMES[data[0] % len(NAMES)]](data[1:])


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for number, name in enumerate(NAMES):
            for index, seed in enumerate(SEEDS[name]):
                (Path(corpus) / f"{name}-{index}").write_bytes(bytes([number]) + seed)
        options = [f"-timeout={ONE_INPUT_S}", "-max_len=4096", "-rss_limit_mb=4096", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, *sys.argv[1:], corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
