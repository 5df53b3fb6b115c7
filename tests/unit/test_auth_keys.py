"""The key file: what its lines mean, and that nothing of a key is ever shown."""

import os
from hashlib import sha256
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.key_file import MAX_FILE_BYTES, MAX_KEYS, InvalidKeyFile, Key, Limit, digest_of, load_keys, parse_keys

ONE, TWO = "first-key-0123456789", "c2Vjb25kLWtleQ==" * 2
HIDDEN = "do-not-show-me-987"


def test_lines_become_keys_with_their_limits() -> None:
    text = f"""
    # the LLM servers
    llm-a:{ONE} requests_per_s=2.5 burst=10   # two of them
    batch:{sha256(TWO.encode()).hexdigest().join(("sha256:", ""))}\tmax_requests=8
    {HIDDEN}
    """
    unnamed = sha256(HIDDEN.encode()).digest()
    assert parse_keys(text) == (
        Key("llm-a", sha256(ONE.encode()).digest(), Limit(2.5, 10, None)),
        Key("batch", sha256(TWO.encode()).digest(), Limit(None, None, 8)),
        Key("line-5", unnamed, Limit()),
    )


def test_a_hash_without_a_name_is_a_hash() -> None:
    (key,) = parse_keys("sha256:" + "AB" * 32)
    assert (key.name, key.digest) == ("line-1", b"\xab" * 32)


def test_neither_a_key_nor_its_digest_is_in_what_is_printed() -> None:
    (key,) = parse_keys(f"a:{HIDDEN}")
    assert HIDDEN not in repr(key)
    assert digest_of(HIDDEN.encode()).hex() not in repr(key)
    assert repr(digest_of(HIDDEN.encode())) not in repr(key)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a:0123456789abcde", "the key has 15 characters, allowed: 16 to 512"),
        ("a:" + "x" * 513, "the key has 513 characters, allowed: 16 to 512"),
        ("a:", "the key has 0 characters"),
        (f"a:{HIDDEN}é", "the key may have letters, digits and"),
        (f"a:{HIDDEN}:more", "the key may have letters, digits and"),
        (f"two words:{HIDDEN}", "after the key only requests_per_s="),
        (f"é:{HIDDEN}", "the name before the colon"),
        (f"{'n' * 65}:{HIDDEN}", "the name before the colon"),
        (f"a:sha256:{HIDDEN}", "sha256: is followed by the 64 hex digits"),
        (f"a:{HIDDEN} requests=3", "after the key only requests_per_s=, burst= and max_requests= may follow"),
        (f"a:{ONE} {HIDDEN}", "after the key only requests_per_s=, burst= and max_requests= may follow"),
        (f"a:{HIDDEN} max_requests=0", "max_requests must be a number above 0"),
        (f"a:{HIDDEN} max_requests=1.5", "max_requests must be a number above 0"),
        (f"a:{HIDDEN} requests_per_s=nan", "requests_per_s must be a number above 0"),
        (f"a:{HIDDEN} requests_per_s=inf", "requests_per_s must be a number above 0"),
        (f"a:{HIDDEN} requests_per_s=", "requests_per_s must be a number above 0"),
        (f"a:{HIDDEN} burst=3", "burst needs requests_per_s beside it"),
        (f"ok:{HIDDEN}", "the same name as in line 1"),
        (f"b:{ONE}", "the same key as in line 1"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_not_shown(line: str, why: str) -> None:
    with pytest.raises(InvalidKeyFile) as caught:
        parse_keys(f"ok:{ONE}\n\n{line}\n")
    assert str(caught.value).startswith(f"line 3: {why}")
    for shown in (str(caught.value), repr(caught.value)):
        assert HIDDEN not in shown
        assert ONE not in shown


def test_many_wrong_lines_are_a_short_message() -> None:
    with pytest.raises(InvalidKeyFile) as caught:
        parse_keys("short\n" * 500)
    assert str(caught.value).startswith("line 1: ")
    assert str(caught.value).endswith(" and 495 more lines")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "\n  \n", "# only words\n"])
def test_a_file_without_keys_is_refused(text: str) -> None:
    with pytest.raises(InvalidKeyFile, match="has no key"):
        parse_keys(text)


def test_the_number_of_keys_is_bounded() -> None:
    lines = [f"key-number-{number:08d}" for number in range(MAX_KEYS + 1)]
    assert len(parse_keys("\n".join(lines[:-1]))) == MAX_KEYS
    with pytest.raises(InvalidKeyFile, match=f"{MAX_KEYS + 1} keys, limit {MAX_KEYS}"):
        parse_keys("\n".join(lines))


def test_a_line_takes_the_defaults_for_what_it_does_not_say() -> None:
    defaults = Limit(10, 50, 4)
    assert Limit().over(defaults) == defaults
    assert Limit(max_requests=9).over(defaults) == Limit(10, 50, 9)
    assert Limit(requests_per_s=2).over(defaults) == Limit(2, None, 4)  # the burst belongs to another rate


class TestFile:
    def test_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"a:{ONE}\n")
        path.chmod(0o640)
        with capture_logs() as logs:
            assert [key.name for key in load_keys(path)] == ["a"]
        assert logs == []

    def test_that_everybody_can_read_is_warned_of(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"a:{ONE}\n")
        path.chmod(0o644)
        with capture_logs() as logs:
            load_keys(path)
        (line,) = logs
        assert (line["log_level"], line["file"]) == ("warning", str(path))
        assert "chmod o-r" in line["event"]

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (None, "cannot be read: No such file or directory"),
            (b"a:\xff\xfe" + HIDDEN.encode(), "is no UTF-8 text"),
            (b"#" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
            (b"a:" + HIDDEN[:5].encode(), "line 1: the key has 5 characters"),
        ],
    )
    def test_that_cannot_be_used_is_named(self, content: bytes | None, why: str, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InvalidKeyFile) as caught:
            load_keys(path)
        assert str(caught.value).startswith(f"key file {path}")
        assert why in str(caught.value)
        assert HIDDEN[:5] not in str(caught.value)

    @pytest.mark.timeout(20)
    def test_that_is_a_pipe_without_a_writer_holds_nothing_up(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "keys", 0o600)
        with pytest.raises(InvalidKeyFile, match="no key"):
            load_keys(tmp_path / "keys")

    def test_that_is_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidKeyFile, match="cannot be read: Is a directory"):
            load_keys(tmp_path)
