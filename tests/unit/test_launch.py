"""A kernel is looked up once for each kind of arguments, and its compiled form gets all of them."""

import pytest
import torch

from encoder import launch as module
from encoder.launch import launch


class Kernel:
    """Stands in for a Triton function: compiles for what it is given first, and says what ran."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, tuple, tuple]] = []
        self.compiled = 0

    def __getitem__(self, grid):
        def first(*args, **options):
            self.compiled += 1
            self.ran.append(("first", grid, args))
            return Compiled(self, self.compiled)

        return first


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self.kernel.ran.append((f"again {self.number}", grid, args))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


X = torch.zeros(64)


def test_the_second_time_the_compiled_kernel_is_launched_with_the_same(kernel):
    for _ in range(2):
        launch(kernel, (5, 2), (X, 48, 0.5), (128, "x"), num_warps=4)
    assert kernel.ran == [("first", (5, 2), (X, 48, 0.5, 128, "x")), ("again 1", (5, 2, 1), (X, 48, 0.5, 128, "x"))]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((X.bfloat16(), 48, 0.5), False),
        ((X[1:], 48, 0.5), False),  # not on 16 bytes
        ((X[4:], 48, 0.5), True),
        ((X, 1, 0.5), False),
        ((X, 47, 0.5), False),
        ((X, 2**31, 0.5), False),  # needs 64 bits
        ((X, 64, 0.5), True),
        ((X, 48, 0.25), True),
    ],
)
def test_what_a_compiled_kernel_depends_on(kernel, other, same):
    launch(kernel, (1,), (X, 48, 0.5), ())
    launch(kernel, (1,), other, ())
    assert kernel.compiled == (1 if same else 2)


def test_constants_and_options_count(kernel):
    for constants, options in [((1,), {}), ((2,), {}), ((2,), {"num_warps": 8})]:
        launch(kernel, (1,), (X,), constants, **options)
    assert kernel.compiled == 3


def test_under_the_interpreter_nothing_is_kept():
    ran = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *args, **options: ran.append(args)

    interpreted = Interpreted()
    for _ in range(2):
        launch(interpreted, (1,), (X, 3), (7,), num_stages=2)
    assert ran == [(X, 3, 7)] * 2
