"""Decides, before anything imports Triton, that its kernels are interpreted where there is no GPU to compile for; and
the process that workers which decode are copies of, which takes two seconds to start, once for all tests.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from app.decode import decoder
from app.decode.template_process import TemplateProcess

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class _LastingTemplate(TemplateProcess):
    """Outlives the decoders that use it."""

    def close(self) -> None:
        """Their workers end without it."""


@pytest.fixture(scope="session")
def _lasting_template() -> Iterator[TemplateProcess]:
    lasting = _LastingTemplate()
    yield lasting
    TemplateProcess.close(lasting)


@pytest.fixture
def shared_template(monkeypatch: pytest.MonkeyPatch, _lasting_template: TemplateProcess) -> None:
    """Every `Decoder` made in the test takes its workers from one template."""
    monkeypatch.setattr(decoder, "TemplateProcess", lambda: _lasting_template)
