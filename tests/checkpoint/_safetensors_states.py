"""safetensors files of the package and by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
SafetensorError = pytest.importorskip("safetensors").SafetensorError

Tensors = dict[str, torch.Tensor]


# Malformed files: the package's verdict and ours


def write_file(path: Path, text: bytes, data: bytes = b"", length: int | None = None) -> None:
    prefix = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(prefix + text + data)


def of(fields: str) -> str:
    return '{"a":{' + fields + "}}"
