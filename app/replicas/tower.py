"""`WorkerTower`: a tower in a process of its own, replaced whenever it dies."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from app.replicas.facts import TowerFacts, TowerSpec, TowerStatus
from app.replicas.link import Link
from app.replicas.messages import Failed, Up
from app.replicas.process import Process
from app.tower import Pending, TowerLost
from encoder import DeviceFailed, PackedBatch

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 1800.0  # hundreds of gigabytes over a slow network are not read faster
STOP_TIMEOUT_S: Final = 5.0  # for the batch that a worker is at when the service ends
FIRST_PAUSE_S: Final = 0.5  # before a process is replaced, doubled for each that did not last
LONGEST_PAUSE_S: Final = 30.0
EXIT_TIMEOUT_S: Final = 5.0  # between the end of a process's socket and its own
LASTING_S: Final = 60.0  # a process that was up for so long is not part of a row of failures


class WorkerTower:
    """One worker process and its successors, under a thread of its own.

    While the process is being replaced, `submit` refuses at once; `is_up` says so before.

    Args:
        width: of the rows.
        stall_s: seconds without an answer after which a worker that has a batch is killed; None never does.
        on_restart: called with the reason when a process is replaced: crashed, device_failed, stalled, or failed (it
            did not load, or loaded other weights than before).
        on_batch: called with the attention backend of every batch.
    """

    def __init__(
        self,
        spec: TowerSpec,
        width: int,
        *,
        stall_s: float | None = None,
        on_restart: Callable[[str], None] = lambda reason: None,
        on_batch: Callable[[str], None] = lambda backend: None,
    ) -> None:
        self.spec = spec
        self.facts: TowerFacts | None = None  # of the first process; those after it have the same weights
        self._width = width
        self._stall_s = stall_s
        self._on_restart = on_restart
        self._on_batch = on_batch
        self._changed = threading.Condition()
        self._state = "starting"
        self._link: Link | None = None  # while a process is up
        self._process: Process | None = None
        self._closing = False
        self._restarts = 0
        self._up_since_s = math.inf
        self._loaded: Future[TowerFacts] = Future()
        self._thread = threading.Thread(target=self._supervise, name=f"tower {spec.device}", daemon=True)

    @property
    def is_up(self) -> bool:
        return self._link is not None

    @property
    def status(self) -> TowerStatus:
        with self._changed:
            process, link = self._process, self._link
            return TowerStatus(
                device=self.spec.device,
                state=self._state,
                pid=process.pid if process else None,
                restarts=self._restarts,
                outstanding_patches=link.outstanding_patches if link else 0,
                attention=(link and link.attention) or (self.facts.attention if self.facts else None),
                out_of_service=link.out_of_service if link else {},
            )

    def start(self) -> None:
        """Start the first process; `wait_until_loaded` says how it went."""
        self._thread.start()

    def wait_until_loaded(self) -> TowerFacts:
        """Until the first process is ready for batches.

        Raises:
            EncoderError: it cannot load.
        """
        return self._loaded.result()

    def wait_until_up(self, timeout_s: float | None = None) -> bool:
        """Until batches can be run, which is now unless a process is being replaced; False after the timeout, or once
        the tower is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None or self._closing, timeout_s)
            return self._link is not None and not self._closing

    def submit(self, batch: PackedBatch) -> Pending:
        """See `Tower`. At most two batches are in the worker; a third waits for an answer to one of them.

        The rows are views of shared memory, which goes back to the worker when nobody has them any more.

        Raises:
            TowerLost: no process is up, or it dies meanwhile.
        """
        link = self._link
        if link is None:
            raise TowerLost(f"no worker is up on {self.spec.device}")
        return link.submit(batch)

    def finish(self) -> None:
        """Take no more batches; the process answers those it has and exits. Does not wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            process, is_loaded = self._process, self._link is not None
        if process is not None:
            if is_loaded:
                process.finish()
            else:
                process.kill()

    def close(self) -> None:
        """`finish`, and wait until the process is gone; one that takes too long is killed."""
        self.finish()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
            with self._changed:
                process = self._process
            if process is not None:
                process.kill()
            self._thread.join()

    # ---- the supervising thread, which the processes live and die with

    def _supervise(self) -> None:
        pause_s = 0.0
        try:
            while True:
                self._up_since_s = math.inf
                try:
                    reason = self._live()
                except Exception:
                    logger.exception("tower on %s: a bug in its supervision", self.spec.device)
                    reason = "failed"
                if self._closing or self.facts is None:
                    return
                has_lasted = time.monotonic() - self._up_since_s > LASTING_S
                pause_s = FIRST_PAUSE_S if has_lasted else min(max(FIRST_PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
                logger.error("tower on %s: %s; the next process starts in %g s", self.spec.device, reason, pause_s)
                with self._changed:
                    self._restarts += 1
                self._on_restart(reason)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, pause_s):
                        return
        finally:
            with self._changed:
                self._closing, self._state = True, "stopped"
                self._changed.notify_all()
            if not self._loaded.done():
                self._loaded.set_exception(DeviceFailed(f"the worker of {self.spec.device} ended before it was loaded"))

    def _live(self) -> str:
        """One process, from start to end; why it ended."""
        try:
            process = Process()
        except OSError as error:  # no process, no descriptor, no memory
            logger.error("tower on %s: no process can be started: %s", self.spec.device, error)
            return "failed"
        link: Link | None = None
        with self._changed:
            self._process = process
            if self._closing:
                process.kill()
        try:
            facts = self._load(process)
            if facts is None:
                return "failed"
            link = Link(process, self._width, self.spec.dtype, self._on_batch)
            self._announce(link, facts)
            reason = link.serve(self._stall_s)
            if reason == "stalled":
                process.kill()
            return reason
        finally:
            self._bury(process, link)

    def _load(self, process: Process) -> TowerFacts | None:
        """What the process says once it is loaded; None if it cannot be used."""
        try:
            process.send(self.spec)
            message = process.receive(START_TIMEOUT_S)
        except (OSError, TimeoutError):
            message = None
        if isinstance(message, Failed):
            logger.error("tower on %s did not load: %s", self.spec.device, message.error)
            if not self._loaded.done():
                self._loaded.set_exception(message.error)
            return None
        if not isinstance(message, Up):
            return None
        if self.facts is not None and message.facts.fingerprint != self.facts.fingerprint:
            logger.error("tower on %s: the checkpoint has changed since the service started", self.spec.device)
            return None
        return message.facts

    def _announce(self, link: Link, facts: TowerFacts) -> None:
        with self._changed:
            self.facts = facts
            self._link = link
            self._state = "up"
            self._changed.notify_all()
        if not self._loaded.done():
            self._loaded.set_result(facts)

    def _bury(self, process: Process, link: Link | None) -> None:
        with self._changed:
            self._link = None
            self._state = "restarting"
        if link is not None:
            link.lose()
        code = process.end(EXIT_TIMEOUT_S)
        logger.info("the worker of %s ended with %d", self.spec.device, code)
        with self._changed:
            self._process = None
