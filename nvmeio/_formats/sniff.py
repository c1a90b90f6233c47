"""The kind of a checkpoint file, told from its name and its first bytes."""

from __future__ import annotations

import errno
import os
import pickle
import re
import tarfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Literal

from nvmeio import files
from nvmeio._files.descriptors import open_error
from nvmeio._formats.torch_archives.torch_zip import LOCAL_MAGIC, PART_MAGIC
from nvmeio._storage import locks
from nvmeio.errors import NvmeioError

Kind = Literal["torch", "torch legacy", "safetensors", "part"]

STEP = re.compile(r"step-([0-9]{8,})(\.pt)?")  # a Checkpointer's names

# The names of torch.distributed.checkpoint's files: of all ranks, or of one that saved alone.
DCP_METADATA = ".metadata"
DCP_DATA = ".distcp"
_DCP_METADATA = re.compile(r"(__\d+)?\.metadata")
_DCP_MARK = b"torch.distributed.checkpoint"  # in the first bytes of its pickle

_HEAD_BYTES = 64

# torch's magic number as the first pickle of its format from before zip files: LONG1 and ten bytes
# in protocols 2 and up (in a frame from 4 on), decimal in 0 and 1.
_LEGACY = re.compile(
    rb"\x80(?:[\x02\x03]|[\x04\x05]\x95\x0d\0{7})\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\."
    rb"|L119547037146038801333356L\n\."
)


class NoCheckpointError(NvmeioError, ValueError, pickle.UnpicklingError):
    """A file that is neither torch's nor safetensors'; also torch.load's `UnpicklingError`."""


class EmptyFileError(NoCheckpointError, EOFError):
    """A file without a byte; an `EOFError` too, for that is what torch.load raises."""


class TruncatedFileError(NoCheckpointError, EOFError):
    """A file that ends in the middle; an `EOFError` too, for that is what torch.load raises."""


def open_file(path: str | os.PathLike[str]) -> AbstractContextManager[files.File]:
    """`locks.open_reading`; the error for a directory says which function loads its content.

    Raises:
        TransferError: It cannot be opened, or is a directory (EISDIR).
    """
    if os.path.isdir(name := files.checked_path(path)):
        raise open_error(errno.EISDIR, name, how_to_load(name))
    return locks.open_reading(path)


def open_checkpoint(path: str | os.PathLike[str]) -> AbstractContextManager[files.File]:
    """`open_file`, of a file that is a checkpoint by itself.

    Raises:
        TransferError: As `open_file`.
        NoCheckpointError: It is a file of a DCP checkpoint, which is loaded as a whole.
    """
    name = files.checked_path(path)
    folder = os.path.dirname(name) or "."
    if is_dcp_file(name) and is_dcp_directory(folder):
        raise NoCheckpointError(f"{name} is a file of {how_to_load(folder)}")
    return open_file(path)


def how_to_load(directory: str) -> str:
    """The loader for a directory of checkpoints that was taken for a file; "" if there are none."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(directory)
    above, name = os.path.split(os.path.realpath(directory))
    step = STEP.fullmatch(name)
    if step and "index.json" in names:
        checkpointer = f"nvmeio.Checkpointer({above!r}, read_only=True)"
        return f"one step of several ranks: {checkpointer}.restore(step={int(step[1])}) loads it"
    if is_dcp_directory(directory):
        reader = f"storage_reader=NvmeStorageReader({directory!r})"
        return f"a DCP checkpoint: torch.distributed.checkpoint.load(state_dict, {reader}) loads it"
    if any(map(STEP.fullmatch, names)):
        newest = os.path.join(directory, os.path.basename(os.path.realpath(f"{directory}/latest")))
        load = f"nvmeio.load({newest!r}) or " if os.path.isfile(newest) else ""
        return (
            f"a Checkpointer's directory: {load}nvmeio.Checkpointer({directory!r}, read_only=True)"
            ".restore() loads its latest checkpoint, and resume() goes on from it"
        )
    if any(name.endswith(".safetensors") for name in names):
        return f"a directory: nvmeio.load_safetensors({directory!r}) loads what is in it"
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    if "config.json" in names and pickled:
        return (
            f"a model whose weights are in torch's files ({', '.join(pickled[:2])}): load it once "
            "with transformers' from_pretrained, and save it with save_pretrained, which writes "
            "safetensors"
        )
    return ""


# Weights of transformers as torch.save writes them.
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def is_dcp_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the name of one of DCP's: metadata, or data."""
    name = os.path.basename(path)
    return name.endswith(DCP_DATA) or _DCP_METADATA.fullmatch(name) is not None


def is_dcp_directory(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory is a DCP checkpoint, or the remains of one."""
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    if any(name.endswith(DCP_DATA) for name in names):
        return True
    return any(
        _is_dcp_metadata(os.path.join(directory, name)) for name in dcp_metadata_names(names)
    )


def dcp_metadata_names(names: Iterable[str]) -> list[str]:
    """Those of a directory's names that DCP gives to its metadata, in order."""
    return sorted(name for name in names if _DCP_METADATA.fullmatch(name))


def _is_dcp_metadata(path: str) -> bool:
    """Whether a file of that name is DCP's: other programs have one as well."""
    try:
        with files.open(path) as file:
            return _DCP_MARK in files.read_buffered(file, 0, min(file.size(), _HEAD_BYTES))
    except NvmeioError:
        return False


def kind_of(file: files.File) -> Kind:
    """The format of an open file; NoCheckpointError if it is none that is known."""
    head = _head_of(file)
    if file.path.endswith(".safetensors") or _has_json(head):
        return "safetensors"
    if head.startswith(LOCAL_MAGIC):
        return "torch"
    if _LEGACY.match(head):
        return "torch legacy"
    if head.startswith(PART_MAGIC):
        return "part"
    raise _foreign(file.path, head, "checkpoint of torch or safetensors")


def check_older(file: files.File) -> None:
    """Refuse a file that is in none of the formats that torch.load reads, with NoCheckpointError.

    torch's own error names no file, and advises ``weights_only=False`` for any text.
    """
    head = _head_of(file)
    if head.startswith(LOCAL_MAGIC) or _LEGACY.match(head):
        return
    if not _has_json(head) and head[0] and tarfile.is_tarfile(file.path):
        return  # torch 0.1; zeros alone, as a crash leaves them, are an empty archive to tarfile
    raise _foreign(file.path, head, "checkpoint of torch")


def _head_of(file: files.File) -> bytes:
    head = files.read_buffered(file, 0, min(file.size(), _HEAD_BYTES))
    if not head:
        raise EmptyFileError(
            f"{file.path} is empty: its writer was interrupted, or has not begun; take another "
            "checkpoint"
        )
    return head


def _has_json(head: bytes) -> bool:
    """Whether it may be safetensors: eight bytes of length, then the header, a JSON object."""
    return head[8:9] == b"{"


def _foreign(path: str, head: bytes, what: str) -> NoCheckpointError:
    if _has_json(head):
        remedy = "it looks like safetensors: nvmeio.load_safetensors reads that"
    elif head.startswith(PART_MAGIC):
        remedy = (
            "it is the part of one rank, and other drives hold the other parts: "
            "nvmeio.Checkpointer([directory, …], shared=False, "
            "read_only=True).restore() puts them together"
        )
    elif not head.strip(b"\0"):
        remedy = "it begins with zeros, as a file does whose data a crash has lost"
    else:
        remedy = f"it begins with {head[:8]!r}; check the path"
    return NoCheckpointError(f"{path} is no {what}: {remedy}")
