"""A model's file replaced, cut or removed while it is read, on every kind of file system.

An open descriptor keeps a file that is replaced, so the old bytes come to the end; one that is cut
short fails and is named. Never other weights.
"""

import os
from contextlib import contextmanager

import pytest
import torch
from faults._support import MIB, formatted, mounted
from torch import nn

import nvmeio

# What holds here holds everywhere else: the others in `make stress`.
ELSEWHERE = ("ext4", "xfs", "btrfs", "f2fs", "tmpfs")
KINDS = ("here", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ELSEWHERE))
CLEAR = (nvmeio.IntegrityError, nvmeio.TransferError)


@contextmanager
def _folder(kind, here):
    if kind == "here":
        yield here
    elif kind == "tmpfs":
        with mounted("tmpfs") as folder:
            yield folder
    elif kind == "f2fs":
        with open("/proc/filesystems") as known:
            if "f2fs" not in known.read().split():
                pytest.skip("this kernel has no f2fs")
        with formatted("f2fs") as folder:
            yield folder
    else:
        with formatted(kind) as folder:
            yield folder


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    with _folder(request.param, tmp_path) as found:
        yield found


class Net(nn.Module):
    """Half a MiB a layer, of which two are in memory at a time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(360, 360) for _ in range(8))
        self.at = {}

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number in self.at:
                self.at.pop(number)()
            x = torch.tanh(block(x))
        return x


def saved(path, seed):
    torch.manual_seed(seed)
    net = Net().eval()
    nvmeio.save_safetensors(net.state_dict(), path)
    return net


def replaced(path):
    """As nearly everybody replaces a file: another one, renamed over it."""
    new = path.with_name("new.safetensors")
    saved(new, 2)
    os.replace(new, path)


@torch.no_grad()
def test_a_model_is_replaced_and_cut_while_it_is_streamed(folder):
    path = folder / "net.safetensors"
    whole = saved(path, 1)
    x = torch.randn(3, 360, generator=torch.Generator().manual_seed(5))
    wanted = whole(x)
    with torch.device("meta"):
        empty = Net().eval()
    net = nvmeio.stream_model(empty, path, resident_bytes=5 * MIB // 4, window=2)
    try:
        net.at[3] = lambda: replaced(path)
        for _ in range(3):
            assert torch.equal(net(x), wanted), "another model's weights"
    finally:
        net.weight_stream.close()
    with torch.device("meta"):
        empty = Net().eval()
    other = nvmeio.stream_model(empty, path, resident_bytes=5 * MIB // 4, window=2)
    try:
        new = other(x)
        assert not torch.equal(new, wanted)
        other.at[3] = lambda: os.truncate(path, path.stat().st_size // 3)
        failed = 0
        for _ in range(3):
            try:
                assert torch.equal(other(x), new), "what was not read any more"
            except CLEAR as error:
                failed += 1
                assert path.name in str(error), error
        assert failed, "a pass that could not read its weights gave values"
    finally:
        other.weight_stream.close()


def test_a_packed_model_is_replaced_and_cut_between_passes(folder, monkeypatch):
    models = pytest.importorskip("inference._models")
    monkeypatch.setattr("nvmeio.inference._plan.units.SMALL_BYTES", 1024)
    models.saved(models.llama, folder / "plain")
    nvmeio.inference.pack(folder / "plain", folder / "packed")
    (path,) = (folder / "packed").glob("*.safetensors")
    ids = models.prompt()
    model = nvmeio.stream_model(folder / "packed", resident_bytes=300_000)
    try:
        wanted = models.logits(model, ids)
        other = path.with_name("new")
        content = bytearray(path.read_bytes())
        content[-4096:] = bytes(4096)
        other.write_bytes(content)
        kept = folder / "kept"
        os.link(path, kept)
        os.replace(other, path)
        for _ in range(3):
            assert models.logits(model, ids).equal(wanted), "another model's weights"
        os.truncate(kept, len(content) // 3)
        failed = 0
        for _ in range(3):
            try:
                assert models.logits(model, ids).equal(wanted), "what was not read any more"
            except CLEAR as error:
                failed += 1
                assert path.name in str(error), error
        assert failed, "a pass that could not read its weights gave values"
    finally:
        model.weight_stream.close()


class Disturbing(nvmeio.AioHandle):
    """Calls `then` before its read of this number; several at once are one."""

    def __init__(self, number, then):
        super().__init__(block_size=64 << 10)
        self.left, self.then = number, then

    def async_pread(self, *args, **named):
        self._count()
        return super().async_pread(*args, **named)

    def async_pread_batch(self, *args, **named):
        self._count()
        return super().async_pread_batch(*args, **named)

    def _count(self):
        self.left -= 1
        if not self.left:
            self.then()


def test_safetensors_replaced_and_cut_while_they_are_loaded(folder):
    path = folder / "state.safetensors"
    old = saved(path, 1).state_dict()
    with Disturbing(1, lambda: replaced(path)) as handle:
        found = nvmeio.load_safetensors(path, handle=handle)
        torch.manual_seed(2)
        new = Net().state_dict()
        assert same(found, old), "the header was of the old one"
        assert handle.left <= 0, "nothing was replaced"
    handle = Disturbing(1, lambda: os.truncate(path, path.stat().st_size // 3))
    with handle:
        try:
            found = nvmeio.load_safetensors(path, handle=handle)
        except CLEAR as error:
            assert path.name in str(error), error
        else:
            assert same(found, new), "what was not read any more"
        assert handle.left <= 0, "nothing was cut"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_files_replaced_and_cut_while_they_are_loaded(folder):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.api import CheckpointException

    from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

    torch.manual_seed(1)
    old = Net().state_dict()
    dcp.save(old, storage_writer=NvmeStorageWriter(folder / "step"), no_dist=True)
    (file,) = (folder / "step").glob("*.distcp")

    def zeros():
        new = file.with_name("new")
        new.write_bytes(bytes(file.stat().st_size))
        os.replace(new, file)

    changes = (lambda: os.truncate(file, file.stat().st_size // 3), zeros)
    content = file.read_bytes()
    for change in changes:
        for number in (1, 2, 4):
            file.write_bytes(content)
            found = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
            with Disturbing(number, change) as handle:
                reader = NvmeStorageReader(folder / "step", handle=handle)
                try:
                    dcp.load(found, storage_reader=reader, no_dist=True)
                except CheckpointException as error:
                    assert file.name in str(error.failures), error.failures
                else:
                    assert same(found, old), "not what was saved"


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
