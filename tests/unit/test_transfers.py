"""The order of copies and computation, on a stand-in for a GPU that does nothing before somebody waits for it, and then
only what that needs: an order that is not asked for is not kept."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from encoder import transfers

NEVER_WRITTEN = "never written"


class Device:
    """Streams of queued operations, each with what has to be done before it."""

    def __init__(self):
        self.current = Stream(self)
        self.done = 0

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Operation:
    def __init__(self, device, run, after):
        self.device, self.run, self.after, self.is_done = device, run, after, False

    def finish(self):
        if not self.is_done:
            for earlier in self.after:
                earlier.finish()
            self.run()
            self.is_done = True
            self.device.done += 1

    synchronize = finish


class Stream:
    def __init__(self, device):
        self.device, self.last = device, None

    def queue(self, run, *more):
        self.last = Operation(self.device, run, [each for each in (self.last, *more) if each])
        return self.last

    def wait_stream(self, other):
        self.queue(lambda: None, other.last)

    def record_event(self):
        return self.queue(lambda: None)


class Memory:
    """A tensor's: on the device, or on the host."""

    shape, dtype = (2,), "float32"

    def __init__(self, device, kind, value=NEVER_WRITTEN, *, pinned=False):
        self.gpu, self.value, self.pinned, self.streams = device, value, pinned, set()
        self.device = SimpleNamespace(type=kind)

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        return Memory(self.gpu, "cpu", self.value, pinned=True)

    def to(self, device, non_blocking=False):
        return Memory(self.gpu, "cuda").copy_(self, non_blocking)

    def copy_(self, source, non_blocking=False):
        def run():
            self.value = source.value

        operation = self.gpu.current.queue(run)
        if not (non_blocking and self.pinned_side(source)):
            operation.finish()  # as a copy from or to pageable memory does
        return self

    def pinned_side(self, source):
        return self.pinned if self.device.type == "cpu" else source.pinned

    def record_stream(self, stream):
        self.streams.add(stream)


@pytest.fixture
def gpu(monkeypatch):
    device = Device()
    cuda = SimpleNamespace(
        Stream=lambda _: Stream(device),
        current_stream=lambda _: device.current,
        stream=lambda each: device.stream(each),
    )
    empty = lambda shape, dtype, pin_memory: Memory(device, "cpu", pinned=pin_memory)  # noqa: E731
    monkeypatch.setattr(transfers, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    return device


def compute(gpu, source):
    """Queue a kernel on the stream that computes; what it reads is what is there when it runs."""
    result = Memory(gpu, "cuda")

    def run():
        result.value = f"f({source.value})"

    gpu.current.queue(run)
    return result


def test_two_batches_in_flight_keep_their_order_without_the_host_waiting(gpu):
    copies = transfers.Transfers("cuda")
    first = compute(gpu, copies.upload(Memory(gpu, "cpu", "a")))
    wait_first = copies.download(first)
    second = compute(gpu, copies.upload(Memory(gpu, "cpu", "b")))
    wait_second = copies.download(second, compute(gpu, second))
    assert gpu.done == 0
    assert [each.value for each in wait_first()] == ["f(a)"]
    assert [each.value for each in wait_second()] == ["f(b)", "f(f(b))"]


def test_the_copies_of_the_second_batch_do_not_wait_for_the_first_computation(gpu):
    copies = transfers.Transfers("cuda")
    compute(gpu, copies.upload(Memory(gpu, "cpu", "a")))
    before = gpu.done
    on_device = copies.upload(Memory(gpu, "cpu", "b"))
    copies._up.last.finish()
    assert on_device.value == "b"
    assert gpu.done - before == 2  # the first upload, which lies before it on its stream, and its own


def test_memory_is_kept_for_the_stream_that_reads_it(gpu):
    copies = transfers.Transfers("cuda")
    uploaded = copies.upload(Memory(gpu, "cpu", "a"))
    assert uploaded.streams == {gpu.current}
    result = compute(gpu, uploaded)
    copies.download(result)
    assert result.streams == {copies._down}


def test_pinned_memory_is_not_copied_first_and_what_lies_on_the_device_stays(gpu, monkeypatch):
    monkeypatch.setattr(Memory, "pin_memory", lambda self: pytest.fail("copied"))
    copies = transfers.Transfers("cuda")
    copies.upload(Memory(gpu, "cpu", "a", pinned=True))
    assert gpu.done == 0
    there = Memory(gpu, "cuda", "b")
    monkeypatch.setattr(there, "to", lambda device: there, raising=False)
    assert copies.upload(there) is there


@pytest.mark.parametrize("pinned", [True, False])
def test_the_first_result_goes_where_it_is_wanted(gpu, pinned):
    copies = transfers.Transfers("cuda")
    place = Memory(gpu, "cpu", pinned=pinned)
    result = compute(gpu, copies.upload(Memory(gpu, "cpu", "a")))
    wait = copies.download(result, result, out=place)
    assert (place.value == NEVER_WRITTEN) is pinned
    first, second = wait()
    assert first is place
    assert (place.value, second.value) == ("f(a)", "f(a)")
