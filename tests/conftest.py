"""Decides, before anything imports Triton, that its kernels are interpreted where there is no GPU to compile for."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
