"""Who saves and loads a training's state: nvmeio, torch, DCP, safetensors and its loaders.

One process holds the state once, and all contenders save the same tensors in turn.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import Sample, timed

import nvmeio
from nvmeio.cli.measure.worker import PeerUnavailable
from peers import _model_state

Load = Callable[[], Any]


class Checkpoints:
    """The process that holds the state."""

    def __init__(self) -> None:
        self._state: Any = None
        self._optimizer: Any = None
        self._small: dict[str, torch.Tensor] = {}
        self._nbytes = 0
        self._copy: list[torch.Tensor] = []
        self._loop = asyncio.new_event_loop()
        self._checkpointer: Any = None
        self._protected: Any = None
        self._stagers: dict[bool, Any] = {}  # of DCP: by whether a process writes
        self._step = 0
        self._work: tuple[torch.Tensor, int] | None = None

    def prepare(self, nbytes: int) -> int:
        """Make the state, unless it is there; how many bytes it has."""
        if self._state is not None:
            return self._nbytes
        self._state, self._optimizer = _model_state.make_with_optimizer(nbytes)
        self._nbytes = _model_state.nbytes_of(self._state)
        return self._nbytes

    def state_nbytes(self) -> int:
        """Bytes of the state."""
        return self._nbytes

    def release(self) -> None:
        """Give everything back."""
        self.close_checkpointer()
        while self._stagers:
            self._stagers.popitem()[1].close()
        self._state, self._copy, self._work = None, [], None
        self._optimizer, self._small = None, {}
        gc.collect()

    def close(self) -> None:
        self.close_checkpointer()
        self._loop.close()

    # Saving, durable

    def torch_save(self, path: str) -> Sample:
        with timed(self._nbytes) as sample:
            torch.save(self._state, path)
            _fsync(path)
        return sample

    def nvmeio_save(self, path: str, checksum: bool = True) -> Sample:
        with timed(self._nbytes) as sample:
            nvmeio.save(self._state, path, checksum=checksum)
        return sample

    def deepspeed_save(self, path: str) -> Sample:
        """DeepSpeed's FastFileWriter on its own op, as its checkpoint engine uses it."""
        try:
            from deepspeed.io import FastFileWriter, FastFileWriterConfig
            from deepspeed.ops.op_builder import AsyncIOBuilder, UtilsBuilder
        except ImportError as error:
            raise PeerUnavailable(str(error), "pip install deepspeed==0.19.8") from error
        if UtilsBuilder.NAME == "deepspeed_not_implemented":
            raise PeerUnavailable(
                "DeepSpeed has no FastFileWriter on a CPU: its UtilsBuilder is for CUDA"
            )
        handle = AsyncIOBuilder().load().aio_handle(1 << 20, 128, False, True, 1)
        pinned = handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
        with timed(self._nbytes) as sample:
            config = FastFileWriterConfig(
                dnvme_handle=handle,
                pinned_tensor=pinned,
                double_buffer=True,
                num_parallel_writers=1,
                writer_rank=0,
            )
            writer = FastFileWriter(file_path=path, config=config)
            torch.save(self._state, writer)
            writer.close()
            _fsync(path)
        return sample

    def dcp_save(self, path: str, ours: bool) -> Sample:
        import torch.distributed.checkpoint as dcp

        with timed(self._nbytes) as sample:
            if ours:
                from nvmeio.integrations.dcp import NvmeStorageWriter

                dcp.save(self._state, storage_writer=NvmeStorageWriter(path), no_dist=True)
            else:
                dcp.save(self._state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        return sample

    def extra_memory_of_save(self, path: str) -> int:
        """Peak growth of resident memory while a blocking save runs."""
        gc.collect()
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc(5)
        nvmeio.save(self._state, path)
        return _resident_bytes("VmHWM") - before

    def extra_memory_of_protected_save(self, directory: str) -> int:
        """Peak growth of resident memory while a save of protected memory is taken and written."""
        self.open_checkpointer(directory, 1, snapshot="protect")
        gc.collect()
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        self.checkpoint()
        return _resident_bytes("VmHWM") - before

    # Many small tensors

    def prepare_small(self, count: int) -> int:
        """Make them; how many bytes they have."""
        self._small = _model_state.make_small(count)
        return sum(tensor.nbytes for tensor in self._small.values())

    def small_save(self, how: str, path: str) -> Sample:
        """Save them with torch, safetensors, or nvmeio in either format; durable."""
        from safetensors.torch import save_file

        nbytes = sum(tensor.nbytes for tensor in self._small.values())
        with timed(nbytes) as sample:
            if how == "torch":
                torch.save(self._small, path)
                _fsync(path)
            elif how == "safetensors":
                save_file(self._small, path)
                _fsync(path)
            elif how == "nvmeio.save":
                nvmeio.save(self._small, path)
            else:
                nvmeio.save_safetensors(self._small, path)
        return sample

    # Beside the training

    def open_checkpointer(self, directory: str, keep: int, snapshot: str = "copy") -> None:
        self.close_checkpointer()
        Path(directory).mkdir(exist_ok=True)
        self._checkpointer = nvmeio.Checkpointer(directory, keep=keep, snapshot=snapshot)

    def open_protected(self, directory: str, keep: int) -> None:
        """Another one, which copies nothing, beside that of `open_checkpointer`; closed with it."""
        Path(directory).mkdir(exist_ok=True)
        self._protected = nvmeio.Checkpointer(directory, keep=keep, snapshot="protect")

    def close_checkpointer(self) -> None:
        for opened in filter(None, (self._checkpointer, self._protected)):
            self._loop.run_until_complete(opened.aclose())
        self._checkpointer = self._protected = None

    def checkpoint(self, protected: bool = False) -> Sample:
        """One save, from the call until it is durable.

        `held_s` is what the caller waited, `written_s` what the background took after that.
        """
        self._step += 1
        checkpointer = self._protected if protected else self._checkpointer
        with timed(self._nbytes) as sample:
            start = time.perf_counter()
            self._loop.run_until_complete(checkpointer.save(self._state, self._step))
            sample.extra["held_s"] = time.perf_counter() - start
            report = self._loop.run_until_complete(checkpointer.wait())
        sample.extra["written_s"] = report.written_s
        return sample

    def dcp_async(self, path: str, process: bool) -> Sample:
        """`dcp.async_save`, written by a thread or by a process; see `checkpoint`.

        The stager is kept, and so is its memory, which the process shares. Only this process's CPU
        time is counted.
        """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if process and not dist.is_initialized():  # it asks for one, of this process alone
            store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        if process not in self._stagers:
            self._stagers[process] = DefaultStager(StagingOptions(False, process, False, False))
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        with timed(self._nbytes) as sample:
            start = time.perf_counter()
            saving = dcp.async_save(
                self._state,
                storage_writer=dcp.FileSystemWriter(path),
                async_checkpointer_type=kind,
                async_stager=self._stagers[process],
                no_dist=not process,
            )
            sample.extra["held_s"] = time.perf_counter() - start
            saving.result()  # type: ignore[union-attr]
        return sample

    def copy(self) -> Sample:
        """One copy of the state in memory, into memory that was touched before."""
        sources = list(_model_state.tensors(self._state).values())
        if not self._copy:
            self._copy = [torch.empty_like(tensor).copy_(tensor) for tensor in sources]
        with timed(self._nbytes) as sample:
            for target, tensor in zip(self._copy, sources, strict=True):
                target.copy_(tensor)
        sample.extra["held_s"] = sample.seconds
        return sample

    def calibrate(self, seconds: float) -> None:
        """Find how many matrix products take so long: the compute of one training step."""
        matrix = torch.randn(1024, 1024)
        count, took = 0, 0.0
        start = time.perf_counter()
        while took < min(seconds, 1.0):
            matrix @ matrix
            count += 1
            took = time.perf_counter() - start
        self._work = (matrix, max(1, int(count * seconds / took)))

    def train(self, steps: int, save: bool) -> Sample:
        """Steps of compute, each followed by a save that goes on beside the next one."""
        assert self._work is not None
        matrix, products = self._work

        async def steps_with_saves() -> None:
            for _ in range(steps):
                for _ in range(products):
                    matrix @ matrix
                if save:
                    self._step += 1
                    await self._checkpointer.save(self._state, self._step)

        with timed(self._nbytes, steps) as sample:
            self._loop.run_until_complete(steps_with_saves())
        if save:
            self._loop.run_until_complete(self._checkpointer.wait())
        return sample

    def leave_a_core_free(self) -> int:
        """From now on torch computes on all cores but one; on how many."""
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        return torch.get_num_threads()

    def take_all_cores(self) -> None:
        """As it was before `leave_a_core_free`."""
        torch.set_num_threads(os.cpu_count() or 2)

    def give_gradients(self) -> None:
        """So that the optimizer has something to do in its steps."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 0.01

    def protected_step(self) -> Sample:
        """A save, then compute, then a step: stopped where it writes to what was not read."""
        assert self._work is not None
        matrix, products = self._work
        self._step += 1
        with timed(self._nbytes) as sample:
            start = time.perf_counter()
            self._loop.run_until_complete(self._checkpointer.save(self._state, self._step))
            sample.extra["held_s"] = time.perf_counter() - start
            for _ in range(products):
                matrix @ matrix
            self._optimizer.step()
        report = self._loop.run_until_complete(self._checkpointer.wait())
        sample.extra["step_held_s"] = report.step_held_s
        sample.extra["protected_share"] = report.protected_bytes / self._nbytes
        return sample

    def train_with_steps(self, steps: int, save: bool) -> Sample:
        """Compute and a step of the optimizer, so many times, each followed by a save."""
        assert self._work is not None
        matrix, products = self._work

        async def train() -> None:
            for _ in range(steps):
                for _ in range(products):
                    matrix @ matrix
                self._optimizer.step()
                if save:
                    self._step += 1
                    await self._checkpointer.save(self._state, self._step)

        with timed(self._nbytes, steps) as sample:
            self._loop.run_until_complete(train())
        if save:
            self._loop.run_until_complete(self._checkpointer.wait())
        return sample

    # Loading, cold: whoever calls has dropped the files from the page cache

    def write_files(self, torch_file: str, safetensors_file: str) -> None:
        """What is loaded: a file of torch.save's, and the same tensors for safetensors."""
        from safetensors.torch import save_file

        torch.save(self._state, torch_file)
        save_file(
            {k: t.contiguous() for k, t in _model_state.tensors(self._state).items()},
            safetensors_file,
        )
        _fsync(torch_file)
        _fsync(safetensors_file)

    def load(self, how: str, path: str) -> Sample:
        """Load with one of the loaders, and let go of it outside the timing."""
        loader = _LOADERS[how](path)
        nbytes = self._nbytes or sum(tensor.nbytes for tensor in self._small.values())
        with timed(nbytes) as sample:
            loaded = loader()
        del loaded
        gc.collect()
        return sample

    def dcp_load(self, path: str, ours: bool) -> Sample:
        """Into tensors that are there already, as DCP does it."""
        import torch.distributed.checkpoint as dcp

        if not self._copy:
            self.copy()
        names = _model_state.tensors(self._state)
        into = {"tensors": dict(zip(names, self._copy, strict=True))}
        with timed(self._nbytes) as sample:
            if ours:
                from nvmeio.integrations.dcp import NvmeStorageReader

                dcp.load(into, storage_reader=NvmeStorageReader(path), no_dist=True)
            else:
                dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return sample

    def dcp_write(self, path: str) -> None:
        """The checkpoint that `dcp_load` loads."""
        import torch.distributed.checkpoint as dcp

        state = {"tensors": _model_state.tensors(self._state)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)

    def require(self, how: str) -> None:
        """Whether a loader is there.

        Raises:
            PeerUnavailable: Its package is missing.
        """
        package = {
            "fastsafetensors": "fastsafetensors",
            "runai": "runai_model_streamer",
            "safetensors": "safetensors",
        }
        name = package.get(how)
        if name is not None:
            try:
                __import__(name)
            except ImportError as error:
                raise PeerUnavailable(
                    str(error), f"pip install {name.replace('_', '-')}"
                ) from error


def _torch_load(path: str) -> Load:
    return lambda: torch.load(path, weights_only=True)


def _torch_load_mmap(path: str) -> Load:
    def load() -> Any:
        loaded = torch.load(path, weights_only=True, mmap=True)
        _model_state.touch(loaded)
        return loaded

    return load


def _safetensors(path: str) -> Load:
    from safetensors.torch import load_file

    def load() -> Any:
        loaded = load_file(path)
        _model_state.touch(loaded)  # it maps the file and reads nothing itself
        return loaded

    return load


def _fastsafetensors(path: str) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [path]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        _model_state.touch(tensors)
        return loader, buffers, tensors

    return load


def _runai(path: str) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            return dict(streamer.get_tensors())

    return load


_LOADERS: dict[str, Callable[[str], Load]] = {
    "torch.load": _torch_load,
    "torch.load, mmap": _torch_load_mmap,
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai": _runai,
    "nvmeio.load": lambda path: lambda: nvmeio.load(path),
    "nvmeio.load_safetensors": lambda path: lambda: nvmeio.load_safetensors(path),
}


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
