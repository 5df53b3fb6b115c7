"""Small batches are bound by launches: the blocks as CUDA graphs over padded numbers of patches.

A graph fixes every launch, not what the launches read. The attention kernel walks a list of query tiles in device
memory, so one graph serves every mix of segments that fits its bucket. Rows beyond the batch hold what an earlier
batch left there; no kernel of a real row reads them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from encoder.attention import Attend
from encoder.attention.triton_varlen import Tiling, TritonAttention, list_tiles
from encoder.model import MoonViT3d

logger = logging.getLogger(__name__)

BUCKETS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Patches of a graph. Above the last one the device takes longer than the host needs to launch the kernels."""

EXTRA_TILES = 15  # each segment may end in a tile that is not full

TOLERANCE = 5e-3  # relative L2 difference of a graph from the same kernels launched one by one


def padded_tiles(lengths: Sequence[int], block_m: int, num_tiles: int) -> npt.NDArray[np.int32]:
    """(num_tiles, 4): `list_tiles`, then tiles of empty segments, which attend to nothing and write nothing."""
    listed = list_tiles(lengths, block_m)
    tiles = np.zeros((num_tiles, 4), np.int32)
    tiles[: len(listed)] = listed
    tiles[len(listed) :, 2] = range(len(listed), num_tiles)
    tiles[len(listed) :, 3] = 1
    return tiles


class Recorder(Protocol):
    """Records launches once, to be repeated as they were: on the same memory, whatever it holds by then."""

    def record(self, launches: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `launches` as often as it takes; the call that repeats them, and the tensor they write each time."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: a result is valid until any of them runs again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # captures cannot be on the default one

    def record(self, launches: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):  # compiles the kernels and sets libraries up, which a capture cannot
            launches()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            out = launches()
        return graph.replay, out


class _Graph(NamedTuple):
    tiling: Tiling
    num_tiles: int
    replay: Callable[[], None]
    out: Tensor


class BlockGraphs:
    """The tower's blocks for small batches. One stream at a time; a result is valid until the next call."""

    def __init__(
        self, model: MoonViT3d, device: torch.device, dtype: torch.dtype, recorder: Recorder | None = None
    ) -> None:
        vision = model.config.vision
        self._model, self._device = model, device
        self._attention = TritonAttention(device, dtype, vision.num_heads, vision.head_dim)
        largest = BUCKETS[-1]
        self._x = torch.zeros((largest, vision.hidden_size), dtype=dtype, device=device)
        self._rope = torch.zeros((largest, vision.head_dim // 2), dtype=torch.complex64, device=device)
        self._tiles = torch.zeros((largest, 4), dtype=torch.int32, device=device)
        self._recorder = recorder
        self._graphs: dict[int, _Graph] = {}

    @property
    def buckets(self) -> list[int]:
        """Those in service, in patches."""
        return list(self._graphs)

    def capture(self) -> None:
        """Capture every bucket and compare it with the eager blocks; one that fails or differs stays out of service."""
        recorder = self._recorder or CudaRecorder(self._device)
        for bucket in reversed(BUCKETS):  # the largest first, so that the others fit into its memory
            try:
                found = self._capture(bucket, recorder)
                difference = self._difference(bucket, found)
            except Exception as error:  # whatever a driver, library or kernel compiler raises: eager serves
                logger.warning("no CUDA graph of %d patches: %s", bucket, type(error).__name__, exc_info=True)
                return
            if difference <= TOLERANCE:
                self._graphs = {bucket: found, **self._graphs}
            else:
                logger.warning("CUDA graph of %d patches is out of service: differs by %.2g", bucket, difference)

    def retire(self) -> None:
        """Launch nothing as a graph any more."""
        self._graphs = {}  # not emptied: another thread may be looking for one

    def fits(self, lengths: Sequence[int]) -> bool:
        return self._find(lengths) is not None

    def run(self, x: Tensor, rope: Tensor, lengths: Sequence[int]) -> Tensor:
        """(L, D) and (L, Dh / 2) of a batch that fits -> (L, D) as the blocks and their last norm give it."""
        found = self._find(lengths)
        if found is None:
            raise ValueError(f"no graph for {len(lengths)} segments of {sum(lengths)} patches")
        self._fill(x, rope, lengths, found.tiling, found.num_tiles)
        found.replay()
        return found.out[: len(x)]

    def _find(self, lengths: Sequence[int]) -> _Graph | None:
        total = sum(lengths)
        for bucket, found in self._graphs.items():
            if bucket >= total:
                tiles = sum(-(-n // found.tiling.block_m) for n in lengths)
                return found if tiles <= found.num_tiles else None
        return None

    def _fill(self, x: Tensor, rope: Tensor, lengths: Sequence[int], tiling: Tiling, num_tiles: int) -> None:
        tiles = torch.from_numpy(padded_tiles(lengths, tiling.block_m, num_tiles))
        if self._device.type == "cuda":
            tiles = tiles.pin_memory()
        self._tiles[:num_tiles].copy_(tiles, non_blocking=True)
        self._x[: len(x)].copy_(x)
        self._rope[: len(rope)].copy_(rope)

    def _capture(self, bucket: int, recorder: Recorder) -> _Graph:
        tiling = self._attention.choose_tiling([bucket])
        num_tiles = -(-bucket // tiling.block_m) + EXTRA_TILES
        self._fill(self._x[:bucket], self._rope[:bucket], [bucket], tiling, num_tiles)
        replay, out = recorder.record(lambda: self._blocks(bucket, tiling, num_tiles))
        return _Graph(tiling, num_tiles, replay, out)

    def _blocks(self, bucket: int, tiling: Tiling, num_tiles: int) -> Tensor:
        attend: Attend = self._attention.over(self._tiles[:num_tiles], tiling)
        out: Tensor = self._model.vision_tower.encoder(self._x[:bucket], self._rope[:bucket], attend, self._model.ops)
        return out

    def _difference(self, bucket: int, found: _Graph) -> float:
        """Largest over a full and a ragged, not full batch; what lies beyond the latter is NaN."""
        differences = []
        generator = torch.Generator(self._device).manual_seed(bucket)
        for lengths in ([bucket], [bucket // 2, 4, bucket // 4]):
            total = sum(lengths)
            x = torch.randn((total, self._x.shape[1]), generator=generator, device=self._device).to(self._x.dtype)
            angles = torch.rand((total, self._rope.shape[1]), generator=generator, device=self._device)
            rope = torch.polar(torch.ones_like(angles), angles)
            self._x.fill_(float("nan"))
            self._fill(x, rope, lengths, found.tiling, found.num_tiles)
            found.replay()
            got = found.out[:total].float()
            self._fill(x, rope, lengths, found.tiling, found.num_tiles)
            want = self._blocks(bucket, found.tiling, found.num_tiles)[:total].float()
            differences.append(float((got - want).norm() / want.norm()))
        self._x.zero_()
        return max(differences, key=lambda value: float("inf") if value != value else value)
