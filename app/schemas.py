"""The wire contract: what `POST /v1/encode` takes and what every route answers. Unknown fields are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

EncodingFormat = Literal["base64", "float", "torch_base64", "safetensors"]
DtypeName = Literal["bfloat16", "float16", "float32"]
Kind = Literal["image", "video"]

JSON = "application/json"
NDJSON = "application/x-ndjson"
SAFETENSORS = "application/vnd.safetensors"
PROBLEM = "application/problem+json"


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ---- request


class MediaUrl(_Request):
    """Where an item's bytes are: `data:`, `https:` or `http:`."""

    url: str = Field(min_length=1)


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


Url = Annotated[MediaUrl, BeforeValidator(_as_url, json_schema_input_type=str | MediaUrl)]
Fps = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class ImageOptions(_Request):
    """Options of one picture; None takes the request's own, then the service's default."""

    apply_exif_orientation: bool | None = Field(None, description="turn the picture as its EXIF tag says [false]")


class VideoOptions(_Request):
    """Options of one film; None takes the request's own, then the service's default."""

    fps: Fps | None = Field(None, description="frames sampled per second [the checkpoint's sample_fps]")
    max_frames: int | None = Field(None, ge=1, description="frames sampled at most, spread over the whole film")
    allow_partial: bool | None = Field(None, description="encode the frames that decode of a damaged film [false]")


class ImagePart(ImageOptions):
    """`{"type": "image_url", "image_url": {"url": ...}}`, as in chat messages."""

    type: Literal["image_url"]
    image_url: Url
    uuid: str | None = Field(None, max_length=256, description="the client's own id, returned as sent")


class VideoPart(VideoOptions):
    """`{"type": "video_url", "video_url": {"url": ...}}`, as in chat messages."""

    type: Literal["video_url"]
    video_url: Url
    uuid: str | None = Field(None, max_length=256, description="the client's own id, returned as sent")


def _as_part(value: Any) -> Any:
    return {"type": "image_url", "image_url": value} if isinstance(value, str) else value


Part = Annotated[
    Annotated[ImagePart | VideoPart, Field(discriminator="type")],
    BeforeValidator(_as_part, json_schema_input_type=str | ImagePart | VideoPart),
]


class TextPart(BaseModel):
    """Text of a chat message: read past."""

    type: Literal["text"]


ChatPart = Annotated[ImagePart | VideoPart | TextPart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """A chat message, of which only the media parts are used."""

    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[ChatPart], Tag("parts")],
            Discriminator(lambda value: "text" if isinstance(value, str) else "parts"),
        ]
        | None
    ) = None


class EncodeOptions(ImageOptions, VideoOptions):
    """Everything of a request but its media: the `request` part of a form, or the query of a raw body."""

    model: str | None = Field(None, description="a served model name")
    encoding_format: EncodingFormat | None = Field(None, description="how the embedding is written [base64]")
    dtype: DtypeName = Field("bfloat16", description="type of the numbers in the answer")
    delivery: Literal["inline"] = Field("inline", description="inline: the answer carries the embedding")
    on_error: Literal["partial", "fail"] = Field("partial", description="fail: one bad item fails the request")
    priority: Literal["interactive", "batch"] = Field(
        "interactive", description="batch: after interactive work, for what nobody sits and waits for"
    )
    deadline_ms: int | None = Field(None, ge=1, description="milliseconds after which the result is of no use")


class RawOptions(EncodeOptions):
    """Query of a request whose body is one picture or film."""

    uuid: str | None = Field(None, max_length=256, description="the client's own id, returned as sent")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class EncodeRequest(EncodeOptions):
    """JSON body of `POST /v1/encode`: `input`, or chat `messages` whose media parts are taken in order."""

    input: Annotated[list[Part], BeforeValidator(_as_list, json_schema_input_type=str | list[Part])] | None = Field(
        None, min_length=1
    )
    messages: list[ChatMessage] | None = Field(None, min_length=1)


# ---- answer


class Problem(BaseModel):
    """RFC 9457 problem. `code` is stable; `detail` says where, what came and what is allowed."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    code: str
    index: int | None = Field(None, description="position of the item at fault")


class Embedding(_Answer):
    """One encoded item. A video is one element with a grid row and a `segment_tokens` entry per chunk."""

    object: Literal["embedding"] = "embedding"
    index: int
    type: Kind
    uuid: str | None = None
    key: str = Field(description="emb- and 64 hex digits; names the embedding (docs/api.md)")
    original_size: tuple[int, int] = Field(description="width, height in pixels as decoded")
    resized_size: tuple[int, int] = Field(description="width, height in pixels before padding")
    grid_thw: list[tuple[int, int, int]] = Field(description="frames, rows, columns in patches; one row per segment")
    num_tokens: int
    segment_tokens: list[int]
    dtype: DtypeName
    shape: tuple[int, int] = Field(description="tokens, width")
    embedding: str | list[list[float]] | None = Field(None, description="absent in a safetensors answer")
    cache: Literal["miss", "hit"] = "miss"
    prompt: str = Field(description="placeholder text: one <|media_pad|> per segment")
    timestamps: list[float] | None = Field(None, description="seconds of each chunk's first frame; videos only")
    frame_indices: list[int] | None = Field(None, description="frames that were read; videos only")


class FailedItem(_Answer):
    """An item that failed alone; the others are not touched."""

    object: Literal["error"] = "error"
    index: int
    type: Kind | None
    uuid: str | None = None
    error: Problem


class Usage(_Answer):
    items: int
    patches: int
    tokens: int
    media_bytes: int


class Timing(_Answer):
    """Milliseconds; of a stage that several items went through, the slowest of them."""

    fetch: float
    decode: float
    queue: float
    encode: float
    total: float


class EncodeAnswer(_Answer):
    object: Literal["list"] = "list"
    id: str
    model: str
    created: int = Field(description="seconds since 1970")
    data: list[Embedding | FailedItem]
    usage: Usage
    timing_ms: Timing


class UsageLine(_Answer):
    """Last line of a streamed answer."""

    object: Literal["usage"] = "usage"
    id: str
    model: str
    created: int
    usage: Usage
    timing_ms: Timing


class Health(_Answer):
    status: Literal["live", "ready"]


class Model(_Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    demo_weights: bool


class ModelList(_Answer):
    object: Literal["list"] = "list"
    data: list[Model]
