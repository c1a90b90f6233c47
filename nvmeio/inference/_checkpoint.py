"""The checkpoint that weights are streamed from: safetensors files, kept open."""

from nvmeio._formats.safetensors_set import Checkpoint as Checkpoint
from nvmeio._formats.safetensors_set import Stored as Stored
