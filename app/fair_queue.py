"""Who is next. Requests take turns by patches, interactive work goes before batch work, and nobody starves.

Within one priority every request has an account of the patches it has been given. The next segment comes from the
request whose account would be lowest with it; one that comes new, or comes back, starts where the last one taken stood.
So a request with hundreds of segments and one with a single picture get the same number of patches while both wait. As
that alone could hold a large segment back behind ever new small ones, none is passed over for more than eight batches.

A segment larger than the budget of a batch, which is small on a small GPU, opens a batch when its turn comes, and is
alone in it.

Interactive work goes first. Beside it the batch class saves up an eighth of every batch and has its next segment taken
once it has saved enough for it: one of the largest waits for nine batches when its turn has come. A batch for which
nothing interactive waits is all its own.

Not thread-safe.
"""

import heapq
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.ticket import Caller, Priority, Ticket, count_bytes, count_patches

BATCH_CLASS_PARTS = 8  # the batch class has one part of so many, while interactive work waits
MAX_PASSED_OVER = 8  # batches


@dataclass(eq=False)
class _Flow:
    """What one request has waiting.

    Attributes:
        number: of its arrival; the older of two that stand equal goes first.
        given: its account, in patches.
        next_since: how many batches there had been when its next segment became that.
    """

    number: int
    given: int
    next_since: int
    tickets: deque[Ticket] = field(default_factory=deque)
    patches: int = 0

    def turn(self, batches: int) -> tuple[bool, int, int]:
        """The lowest is next."""
        if batches - self.next_since > MAX_PASSED_OVER:
            return False, self.next_since, self.number
        return True, self.given + self.tickets[0].num_patches, self.number

    def pop(self) -> Ticket:
        ticket = self.tickets.popleft()
        self.patches -= ticket.num_patches
        return ticket

    def drop_abandoned(self) -> list[Ticket]:
        """What was dropped."""
        dropped = [ticket for ticket in self.tickets if ticket.abandoned]
        self.tickets = deque(ticket for ticket in self.tickets if not ticket.abandoned)
        self.patches -= count_patches(dropped)
        return dropped


class Turns:
    """Requests of one priority, each with its segments in order."""

    def __init__(self) -> None:
        self._flows: dict[Caller, _Flow] = {}
        self.patches = 0
        self.num_bytes = 0
        self._level = 0  # the account of whoever was last given something
        self._arrivals = 0
        self._batches = 0

    def __bool__(self) -> bool:
        return bool(self._flows)

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for flow in self._flows.values() for ticket in flow.tickets)

    def patches_counting_at_most(self, share: int) -> int:
        """As `patches`, with none of the requests counted for more than `share`."""
        return sum(min(flow.patches, share) for flow in self._flows.values())

    def patches_of(self, caller: Caller) -> int:
        flow = self._flows.get(caller)
        return flow.patches if flow else 0

    @property
    def next_patches(self) -> int:
        """Of the segment whose turn it is; 0 if none waits."""
        flow = min(self._flows.values(), key=lambda flow: flow.turn(self._batches), default=None)
        return flow.tickets[0].num_patches if flow else 0

    def add(self, caller: Caller, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        flow = self._flows.get(caller)
        if flow is None:
            self._arrivals += 1
            flow = self._flows[caller] = _Flow(self._arrivals, self._level, self._batches)
        flow.tickets.extend(tickets)
        patches = count_patches(tickets)
        flow.patches += patches
        self.patches += patches
        self.num_bytes += count_bytes(tickets)

    def take(self, room: int, enough: int, enough_bytes: int, *, passing: bool = True, alone: int = 0) -> list[Ticket]:
        """Remove what is next, at most `room` patches, until `enough` or `enough_bytes` are together.

        Args:
            alone: what has no room is taken all the same where it is the first and has at most so many patches.
            passing: a segment that does not fit lets smaller ones of others pass. Its account stays the lowest, so it
                is the first to be taken from then on.
        """
        self._batches += 1
        heads = [(flow.turn(self._batches), caller, flow) for caller, flow in self._flows.items()]
        heapq.heapify(heads)
        taken: list[Ticket] = []
        while heads and enough > 0 and enough_bytes > 0:
            _, caller, flow = heapq.heappop(heads)
            patches = flow.tickets[0].num_patches
            if patches > room and (taken or patches > alone):
                if passing:
                    continue
                break
            ticket = flow.pop()
            self.patches -= ticket.num_patches
            self.num_bytes -= ticket.num_bytes
            if not ticket.abandoned:
                taken.append(ticket)
                room -= ticket.num_patches
                enough -= ticket.num_patches
                enough_bytes -= ticket.num_bytes
                flow.given += ticket.num_patches
                self._level = max(self._level, flow.given)
            flow.next_since = self._batches
            if flow.tickets:
                heapq.heappush(heads, (flow.turn(self._batches), caller, flow))
            else:
                del self._flows[caller]
        return taken

    def drop_abandoned(self, caller: Caller) -> int:
        """Patches that were dropped."""
        flow = self._flows.get(caller)
        if flow is None:
            return 0
        dropped = flow.drop_abandoned()
        self.patches -= count_patches(dropped)
        self.num_bytes -= count_bytes(dropped)
        if not flow.tickets:
            del self._flows[caller]
        return count_patches(dropped)


class FairQueue:
    """Everything that waits for a device.

    Args:
        max_batch_patches: no batch of several segments has more.
        max_batch_bytes: a batch is closed when its pixels have so many, so one segment more than that is the most.
    """

    def __init__(self, max_batch_patches: int, max_batch_bytes: int = sys.maxsize) -> None:
        self._max_batch = max_batch_patches
        self._max_bytes = max_batch_bytes
        self._again: deque[list[Ticket]] = deque()
        self._turns: dict[Priority, Turns] = {"interactive": Turns(), "batch": Turns()}
        self._saved = 0  # patches that the batch class has to its credit
        self._batch_class_opens = False

    def __bool__(self) -> bool:
        return bool(self._again or any(self._turns.values()))

    @property
    def patches(self) -> int:
        return sum(map(count_patches, self._again)) + sum(turns.patches for turns in self._turns.values())

    @property
    def num_bytes(self) -> int:
        """Of the pixels of everything that waits."""
        return sum(map(count_bytes, self._again)) + sum(turns.num_bytes for turns in self._turns.values())

    def patches_counting_at_most(self, share: int) -> int:
        """As `patches`, with none of the requests counted for more than `share`."""
        turns = self._turns.values()
        return sum(map(count_patches, self._again)) + sum(each.patches_counting_at_most(share) for each in turns)

    def patches_of(self, caller: Caller) -> int:
        """What this request has waiting for the first time."""
        return self._turns[caller.priority].patches_of(caller)

    def add(self, caller: Caller, tickets: Sequence[Ticket]) -> None:
        """Queue segments of one request behind those it has waiting."""
        self._turns[caller.priority].add(caller, tickets)

    def take(self, enough: int | None = None) -> list[Ticket]:
        """Remove the next batch: as much as fits, or less once `enough` patches are together. Abandoned tickets are
        dropped on the way, so it may be empty."""
        room, room_bytes, whatever = self._max_batch, self._max_bytes, sys.maxsize
        enough = room if enough is None else enough
        interactive, batch_class = self._turns["interactive"], self._turns["batch"]
        if not interactive:
            return batch_class.take(room, enough, room_bytes, alone=whatever)
        if not batch_class:
            self._saved, self._batch_class_opens = 0, False
            return interactive.take(room, enough, room_bytes, alone=whatever)
        most = max(self._max_batch, batch_class.next_patches)
        self._saved = min(self._saved - (-self._max_batch // BATCH_CLASS_PARTS), most)
        batch = [] if self._batch_class_opens else interactive.take(room, 1, room_bytes, alone=whatever)
        allowed = min(self._saved, room - count_patches(batch))
        saved_for = batch_class.take(
            allowed, allowed, room_bytes - count_bytes(batch), passing=False, alone=0 if batch else self._saved
        )
        self._saved -= count_patches(saved_for)
        # Either class's next segment fits an empty batch: what found no room beside the other's opens the one after.
        self._batch_class_opens = 0 < batch_class.next_patches <= self._saved
        batch += saved_for
        used = count_patches(batch)
        return batch + interactive.take(
            room - used, enough - used, room_bytes - count_bytes(batch), alone=0 if batch else whatever
        )

    def put_back(self, batch: list[Ticket]) -> None:
        """Have these run again, before all else and with no others beside them."""
        if batch:
            self._again.append(batch)

    @property
    def has_again(self) -> bool:
        return bool(self._again)

    def take_again(self) -> list[Ticket]:
        """Remove one batch that was put back, without what has been abandoned meanwhile."""
        return [ticket for ticket in self._again.popleft() if not ticket.abandoned]

    def drop_abandoned(self, caller: Caller) -> int:
        """Let go of what this request has waiting and does not want any more; patches that were dropped."""
        return self._turns[caller.priority].drop_abandoned(caller)

    def clear(self) -> list[Ticket]:
        """Remove and return everything."""
        left = [ticket for batch in self._again for ticket in batch]
        left += [ticket for turns in self._turns.values() for ticket in turns]
        self._again.clear()
        self._turns = {"interactive": Turns(), "batch": Turns()}
        return left
