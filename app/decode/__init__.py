"""Bytes of a picture or film -> segments, within limits, and away from the event loop."""

from app.decode.decoder import Decoder
from app.decode.media import DecodeLimits, Jobs, Kind, MediaOptions, Prepared
from app.decode.sniff import identify

__all__ = ["DecodeLimits", "Decoder", "Jobs", "Kind", "MediaOptions", "Prepared", "identify"]
