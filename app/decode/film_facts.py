"""What is known of a film before it is decoded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FilmHeader:
    """One film's video stream.

    Attributes:
        width, height: of a frame in pixels, before the turn.
        rotation: degrees counter-clockwise that the display matrix asks for: 0, 90, 180 or 270.
        num_frames: frames that the film promises; a damaged one has fewer.
        fps: average frames per second by the header, as decord's `get_avg_fps`.
        index_of_stamp: presentation stamp -> position in the film; None where stamps do not tell frames apart.
        not_for_decord: why decord would fail or deliver wrong frames, or None.
    """

    width: int
    height: int
    rotation: int
    num_frames: int
    fps: float
    index_of_stamp: dict[int, int] | None
    not_for_decord: str | None

    @property
    def turned_size(self) -> tuple[int, int]:
        """(width, height) in pixels as displayed."""
        return (self.height, self.width) if self.rotation in (90, 270) else (self.width, self.height)
