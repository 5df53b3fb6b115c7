"""How large a batch the device's free memory is good for, from a forward pass that is measured."""

import torch

from encoder.engine import Engine
from encoder.grid import Grid
from encoder.segments import Segment, pack

MEASURED = Grid(1, 64, 64)
MARGIN = 1.25
"""On the bytes of a patch: 18,944 in a batch of 5,476 or 43,056 patches of K3 in bfloat16, 21,504 in a single picture
of 65,536, whose position table is new (H200)."""

OTHER_BYTES = 2**30
"""For the tables that are kept (two kinds of 256 MiB), libraries, and the copies of one batch beside the next."""


def patches_that_fit(engine: Engine) -> int | None:
    """Patches of one batch that fit into the memory which is free now; None on a CPU, whose memory is not asked.

    Runs two small batches, the first so that only the second's own memory is counted.
    """
    if engine.device.type != "cuda":
        return None
    patch = engine.config.vision.patch_size
    pixels = torch.zeros((MEASURED.num_patches, 3, patch, patch), dtype=torch.uint8)
    batch = pack([Segment(pixels, MEASURED)], engine.config)
    engine.run(batch)
    torch.cuda.reset_peak_memory_stats(engine.device)
    before = torch.cuda.memory_allocated(engine.device)
    engine.run(batch)
    used = torch.cuda.max_memory_allocated(engine.device) - before
    free, _ = torch.cuda.mem_get_info(engine.device)
    unused = torch.cuda.memory_reserved(engine.device) - torch.cuda.memory_allocated(engine.device)
    return max(0, int((free + unused - OTHER_BYTES) / (MARGIN * used / MEASURED.num_patches)))
