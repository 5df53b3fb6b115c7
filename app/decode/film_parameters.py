"""The bytes of a key frame's packet that fix the frame size, so that a change of size is seen without decoding."""

_NAL_SPS = {"h264": 7, "hevc": 33}
# Where the length of NAL lengths stands in the codec's configuration record (its lowest two bits, plus one).
_LENGTH_SIZE_AT = {"h264": 4, "hevc": 21}


def frame_parameters(codec: str, extradata: bytes | None, packet: bytes) -> bytes:
    """Equal for two key frames of one size; may differ for other reasons, and is empty where the packet says nothing.

    Args:
        codec: FFmpeg's name.
        extradata: the stream's configuration record (`avcC` or `hvcC` for H.264 and HEVC).
    """
    if codec == "vp8":
        return packet[6:10]
    if codec == "vp9":  # in profile 0 the sizes end in the middle of the last byte
        return packet[4:8] + bytes(byte & 0xF0 for byte in packet[8:9])
    if codec in _NAL_SPS and extradata and len(extradata) > _LENGTH_SIZE_AT[codec]:
        return _parameter_sets(codec, (extradata[_LENGTH_SIZE_AT[codec]] & 3) + 1, packet)
    return b""


def _parameter_sets(codec: str, length_size: int, packet: bytes) -> bytes:
    found = b""
    at = 0
    while at + length_size < len(packet):
        length = int.from_bytes(packet[at : at + length_size], "big")
        at += length_size
        kind = packet[at] & 0x1F if codec == "h264" else packet[at] >> 1 & 0x3F
        if kind == _NAL_SPS[codec]:
            found += packet[at : at + length]
        at += length
    return found
