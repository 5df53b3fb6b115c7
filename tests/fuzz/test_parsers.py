"""The request parsers on made-up bytes: each gives a result or refuses in its own words; `make fuzz` goes on."""

import importlib.util
import os
import random
import re
import subprocess
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutate
from tests.fuzz.parsers import PARSERS, SEEDS

SECONDS = os.environ.get("FUZZ_PARSERS_S", "8")
MUTATIONS = 4000


@pytest.mark.parametrize("parser", sorted(PARSERS))
@settings(max_examples=100, deadline=2000)
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
@example(b"")
def test_any_bytes(parser: str, data: bytes) -> None:
    PARSERS[parser](data)


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_what_was_sound_before(parser: str) -> None:
    choice, seeds = random.Random(3), tuple(SEEDS[parser])
    for _ in range(MUTATIONS):
        data = mutate(choice.choice(seeds), seeds, choice)
        start = time.process_time()
        PARSERS[parser](data)
        assert time.process_time() - start < 2, data.hex()


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no build for this Python or system"
)
def test_a_fuzzer_that_watches_the_branches_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", f"-max_total_time={SECONDS}", "-seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    assert executed is not None, done.stderr[-1000:]
    assert int(executed[1]) > 100
