import pytest
from pydantic import ValidationError

from app.settings import PREFIX, SGLANG_ATTENTION, InvalidSettings, Settings, load_settings
from encoder import SetupError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own variables must not reach these tests."""
    import os

    for name in list(os.environ):
        if name.upper().startswith(PREFIX) or name == SGLANG_ATTENTION:
            monkeypatch.delenv(name)


def test_every_option_has_a_description() -> None:
    undescribed = [name for name, field in Settings.model_fields.items() if not field.description]
    assert undescribed == []


def test_defaults_need_neither_flags_nor_variables() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "demo:k3-tiny")
    assert settings.attention_backend == "auto"
    assert settings.allowed_media_domains == ()


def test_a_variable_sets_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_PORT", "9001")
    monkeypatch.setenv("MOONVIT_ALLOW_PRIVATE_MEDIA", "true")
    settings = load_settings()
    assert settings.port == 9001
    assert settings.allow_private_media is True


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_PORT", "9001")
    monkeypatch.setenv("MOONVIT_MAX_ITEMS", "7")
    settings = load_settings({"port": "9002"})
    assert settings.port == 9002
    assert settings.max_items == 7


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MOONVIT_MAX_BATCH_PATCH", "did you mean MOONVIT_MAX_BATCH_PATCHES?"),
        ("MOONVIT_ATENTION_BACKEND", "did you mean MOONVIT_ATTENTION_BACKEND?"),
        ("moonvit_prot", "did you mean MOONVIT_PORT?"),
    ],
)
def test_a_misspelt_variable_is_refused_with_a_hint(variable: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InvalidSettings, match="names no option") as caught:
        load_settings()
    assert variable in str(caught.value)
    assert hint in str(caught.value)


def test_every_unknown_variable_is_named_and_nonsense_gets_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_QQQQQQQQQQQQQQQQ", "1")
    monkeypatch.setenv("MOONVIT_POTR", "1")
    with pytest.raises(InvalidSettings) as caught:
        load_settings()
    potr, nonsense = str(caught.value).split("; variable ")
    assert "MOONVIT_POTR" in potr
    assert nonsense == "MOONVIT_QQQQQQQQQQQQQQQQ names no option"


class TestAttentionBackend:
    def test_sglang_variable_counts_when_ours_is_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SGLANG_ATTENTION, "triton_attn")
        assert load_settings().attention_backend == "triton_attn"

    def test_our_variable_wins_over_sglang_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SGLANG_ATTENTION, "triton_attn")
        monkeypatch.setenv("MOONVIT_ATTENTION_BACKEND", "sdpa")
        assert load_settings().attention_backend == "sdpa"

    @pytest.mark.parametrize("variable", ["MOONVIT_ATTENTION_BACKEND", SGLANG_ATTENTION])
    def test_a_flag_wins_over_both_variables(self, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(variable, "sdpa")
        assert load_settings({"attention_backend": "reference"}).attention_backend == "reference"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
        ("max_items", "0"),
        ("max_batch_patches", "3"),
        ("rms_norm_eps", "0"),
        ("rms_norm_eps", "1"),
        ("dtype", "int8"),
        ("log_level", "loud"),
        ("drain_timeout_s", "-0.5"),
        ("film_worker_memory_bytes", "1024"),
        ("allow_private_media", "perhaps"),
    ],
)
def test_a_value_out_of_bounds_names_flag_and_variable(option: str, value: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings({option: value})
    flag = "--" + option.replace("_", "-")
    assert str(caught.value).startswith(f"{flag} (or {PREFIX}{option.upper()}): Input should be")
    assert isinstance(caught.value, SetupError)


def test_all_wrong_values_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_MAX_ITEMS", "none")
    with pytest.raises(InvalidSettings) as caught:
        load_settings({"port": "x"})
    assert "--port" in str(caught.value)
    assert "--max-items" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("media.example", ("media.example",)),
        (" a.example , b.example,", ("a.example", "b.example")),
        ("", ()),
    ],
)
def test_allowed_media_domains_is_a_comma_separated_list(
    text: str, domains: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings({"allowed_media_domains": text}).allowed_media_domains == domains
    monkeypatch.setenv("MOONVIT_ALLOWED_MEDIA_DOMAINS", text)
    assert load_settings().allowed_media_domains == domains


def test_settings_cannot_be_changed() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
