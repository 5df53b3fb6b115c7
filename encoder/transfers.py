"""Copies between the host and one GPU through pinned memory, each direction on a stream of its own."""

from collections.abc import Callable

import torch
from torch import Tensor


class Transfers:
    """Copies of one batch run beside the computation of another; compute means the stream current when called.

    PyTorch hands a pinned block out again only after the copies queued from or to it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, host: Tensor) -> Tensor:
        """The tensor on the device; the compute stream waits for it, the host does not."""
        if host.device.type != "cpu":
            return host.to(self._device)
        pinned = host if host.is_pinned() else host.pin_memory()
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._up):
            tensor = pinned.to(self._device, non_blocking=True)
        compute.wait_stream(self._up)
        tensor.record_stream(compute)
        return tensor

    def download(self, *tensors: Tensor, out: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Queue copies into pinned memory after what is queued now; the call that comes back waits for them.

        Args:
            out: host memory for the first tensor, of its shape and dtype; pinned, or the call waits for its copy.
        """
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            places = [out if i == 0 else None for i in range(len(tensors))]
            copies = [
                (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if place is None else place).copy_(
                    tensor, non_blocking=True
                )
                for tensor, place in zip(tensors, places, strict=True)
            ]
            copied = self._down.record_event()
        for tensor in tensors:
            tensor.record_stream(self._down)

        def wait() -> list[Tensor]:
            copied.synchronize()
            return copies

        return wait
