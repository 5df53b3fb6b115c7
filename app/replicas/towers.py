"""`Towers`: what a service computes with, in its process or in workers; loaded together, the same weights in all."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from app.replicas.devices import cpu_threads, tower_devices
from app.replicas.facts import TowerFacts, TowerSpec, TowerStatus
from app.replicas.inline import EngineTower
from app.replicas.tower import WorkerTower
from app.settings import Settings
from app.tower import Pending
from encoder import PackedBatch, SetupError


class ReportingTower(Protocol):
    """A tower that says how it is."""

    @property
    def status(self) -> TowerStatus: ...
    def submit(self, batch: PackedBatch) -> Pending: ...


class Towers:
    """Nothing is started, and no device touched, before `start`.

    Args:
        device, dtype: what the settings mean here.
        width: of the rows.
        stall_s: see `WorkerTower`; a tower of this process cannot be replaced.
        on_restart: called with a tower's number and the reason.
        on_batch: called with a tower's number and the attention backend of every batch.
    Raises:
        InvalidSettings: devices that are not there.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        *,
        stall_s: float | None,
        on_restart: Callable[[int, str], None] = lambda tower, reason: None,
        on_batch: Callable[[int, str], None] = lambda tower, backend: None,
    ) -> None:
        devices = tower_devices(settings, device)
        self._on_batch = on_batch
        self._inline: EngineTower | None = None
        self.are_workers = len(devices) > 1 or settings.tower_process
        threads = cpu_threads(len(devices)) if self.are_workers else None
        self._specs = [
            TowerSpec(
                model=settings.model,
                device=str(each),
                dtype=dtype,
                attention_backend=settings.attention_backend,
                rms_norm_eps=settings.rms_norm_eps,
                quantization=None if settings.quantization == "none" else settings.quantization,
                preprocess_device=settings.preprocess_device,
                cuda_graphs={"auto": None, "on": True, "off": False}[settings.cuda_graphs],
                threads=threads,
                log_level=settings.log_level,
                log_format=settings.log_format,
            )
            for each in devices
        ]
        self._workers: Sequence[WorkerTower] = []
        if self.are_workers:
            self._workers = [
                WorkerTower(
                    spec, width, stall_s=stall_s, on_restart=partial(on_restart, i), on_batch=partial(on_batch, i)
                )
                for i, spec in enumerate(self._specs)
            ]

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def all(self) -> Sequence[ReportingTower]:
        """Those that can be submitted to, once started."""
        return self._workers or ([self._inline] if self._inline else [])

    @property
    def statuses(self) -> list[TowerStatus]:
        """Of each, in order, at any time."""
        running = self.all
        if running:
            return [tower.status for tower in running]
        return [TowerStatus(spec.device, "starting", None, 0, 0, None) for spec in self._specs]

    @property
    def any_up(self) -> bool:
        return any(status.state == "up" for status in self.statuses)

    def start(self) -> TowerFacts:
        """Load all at the same time and wait until each is ready for batches; what the first says of itself, and what
        all of them can do.

        Raises:
            SetupError: one cannot load, or they loaded different weights; `EncoderError` too, if a device fails.
        """
        if not self.are_workers:
            self._inline = EngineTower(self._specs[0].load(), partial(self._on_batch, 0))
            return self._inline.facts
        for worker in self._workers:
            worker.start()
        facts = [worker.wait_until_loaded() for worker in self._workers]
        if len({each.fingerprint for each in facts}) > 1:
            found = ", ".join(f"{each.device} {each.fingerprint[:12]}" for each in facts)
            raise SetupError(f"the towers loaded different weights: {found}")
        fits = [each.patches_that_fit for each in facts if each.patches_that_fit is not None]
        return replace(
            facts[0],
            patches_that_fit=min(fits, default=None),
            defers_preprocessing=all(each.defers_preprocessing for each in facts),
        )

    def close(self) -> None:
        """End the workers; each finishes what it has, if that does not take long. Waits until they are gone."""
        for worker in self._workers:
            worker.finish()
        closing = [threading.Thread(target=worker.close) for worker in self._workers]  # each may take seconds
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
