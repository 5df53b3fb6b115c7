"""Opening a film with PyAV so that only listed containers and codecs are ever touched, and reading its packets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import av
import av.container
import av.error
import av.stream

from app.errors import CorruptMedia, UnsupportedMedia

CODECS: Final = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg", "gif")

# FFmpeg's names. With these no playlist, no image sequence and no other decoder is opened, not even for a look at it.
_CONTAINERS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,flv,ogg,gif"
_DECODERS: Final = "h264,hevc,vp8,libvpx,vp9,libvpx-vp9,av1,libdav1d,libaom-av1,mpeg4,mjpeg,gif"


@contextmanager
def opened(path: str, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """(container, its best video stream); the decoder refuses frames of more than `max_pixels`.

    Raises:
        CorruptMedia: the header makes no sense.
        UnsupportedMedia: no video stream, or a codec outside the list.
    """
    options = {
        "format_whitelist": _CONTAINERS,
        "codec_whitelist": _DECODERS,
        "protocol_whitelist": "none",
        "max_pixels": str(max_pixels),
    }
    with Path(path).open("rb") as file:
        try:
            container = av.open(file, options=options, metadata_errors="replace")
        except MemoryError:
            raise
        except Exception as error:  # broken headers drive PyAV to more than its own errors
            raise CorruptMedia("film whose header does not read") from error
        with container:
            stream = _video_stream(container)
            stream.codec_context.options = {"max_pixels": str(max_pixels)}
            yield container, stream


def codec_of(stream: Any) -> str:
    """FFmpeg's name of the codec, whichever decoder was chosen for it."""
    return str(stream.codec_context.codec.canonical_name)


def packets(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's packets in file order, up to its end or to where the file stops making sense."""
    try:
        for packet in container.demux(stream):
            if packet.size or packet.pts is not None:  # not the empty one that PyAV adds to flush the decoder
                yield packet
    except MemoryError:
        raise
    except (av.error.FFmpegError, ValueError):
        return


def decode(stream: Any, packet: Any) -> list[Any] | None:
    """Frames that come out when the packet (None: the end) goes in; None if it does not decode."""
    try:
        return list(stream.codec_context.decode(packet))
    except MemoryError:
        raise
    except (av.error.FFmpegError, ValueError):
        return None


def _video_stream(container: Any) -> Any:
    stream = container.streams.best("video")
    if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
        raise UnsupportedMedia("film without a video stream")
    codec = None if stream.codec_context is None else codec_of(stream)
    if codec not in CODECS:
        raise UnsupportedMedia(f"film with {codec or 'an unknown'} codec, allowed: {', '.join(CODECS)}")
    return stream
