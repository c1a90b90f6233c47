"""The process that steps and computes: with state on disk through nvmeio, and in memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
from _measure import Sample, percentile, timed

from nvmeio.offload import SwappedModule, SwappedOptimizer

WIDTH = 2048
TICK_S = 0.001


class Offloads:
    """Optimizers over layers of one width; gradients stay as they are from step to step."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._unchecked: Any = None
        self._memory: Any = None
        self._half: Any = None
        self._module: Any = None
        self._plain: Any = None
        self._resident = 0
        self._batch = torch.randn(64, WIDTH)

    # The step

    def prepare(self, directory: str, parameters: int, group: int) -> None:
        """A swapped optimizer and one in memory, each stepped twice."""
        if self._optimizer is not None:
            return
        # What torch imports at the first step, and what glibc keeps of freed memory, is not ours.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD (man 3 mallopt)
        with SwappedOptimizer(
            torch.optim.AdamW,
            _weights(1, torch.float32),
            swap_dir=_folder(directory, "warm"),
            fused=True,
        ) as warm:
            warm.step()
            warm.step()
        gc.collect()
        weights = _weights(parameters, torch.float32)
        before = _anonymous_bytes()
        self._optimizer = _stepped(weights, _folder(directory, "fp32"), group)
        gc.collect()
        self._resident = _anonymous_bytes() - before
        self._memory = torch.optim.AdamW(_weights(parameters, torch.float32), fused=True)
        for _ in range(2):
            self._memory.step()

    def sizes(self) -> dict[str, int]:
        """Bytes of a step, and of memory."""
        plan = self._optimizer.plan
        return {
            "read": plan.read_bytes,
            "written": plan.written_bytes,
            "changed": 12 * plan.parameters,
            "planned": plan.memory_bytes,
            "resident": self._resident,
        }

    def step(self) -> Sample:
        return _timed_step(self._optimizer)

    def step_in_memory(self) -> Sample:
        with timed() as sample:
            self._memory.step()
        return sample

    def async_step(self) -> Sample:
        """A step beside a loop that notes how late a 1 ms timer is."""
        self._optimizer._swapper.store.settle()

        async def main() -> tuple[float, list[float]]:
            lags: list[float] = []
            began = time.perf_counter()
            step = asyncio.create_task(self._optimizer.async_step())
            while not step.done():
                due = time.perf_counter() + TICK_S
                await asyncio.sleep(TICK_S)
                lags.append((time.perf_counter() - due) * 1e3)
            await step
            return time.perf_counter() - began, lags

        taken, lags = asyncio.run(main())
        return Sample(
            seconds=taken,
            extra={"p99_ms": percentile(lags, 99), "worst_ms": max(lags)},
        )

    def prepare_unchecked(self, directory: str, parameters: int, group: int) -> None:
        """A swapped optimizer like that of `prepare`, without checksums."""
        if self._unchecked is None:
            weights = _weights(parameters, torch.float32)
            folder = _folder(directory, "unchecked")
            self._unchecked = _stepped(weights, folder, group, checksum=False)

    def step_unchecked(self) -> Sample:
        return _timed_step(self._unchecked)

    # The step as ZeRO-3 does it: bf16 weights, fp32 masters

    def prepare_half(self, directory: str, parameters: int, group: int) -> None:
        if self._half is None:
            weights = _weights(parameters, torch.bfloat16)
            folder = _folder(directory, "bf16")
            self._half = _stepped(weights, folder, group, master_dtype=torch.float32)

    def step_half(self) -> Sample:
        return _timed_step(self._half)

    # Forward and backward

    def prepare_module(self, directory: str, nbytes: int) -> None:
        if self._module is None:
            layers = max(8, nbytes // (4 * WIDTH * WIDTH))
            torch.manual_seed(0)
            self._plain = _layers(layers)
            self._module = SwappedModule(
                _layers(layers),
                swap_dir=_folder(directory, "module"),
                resident_bytes=layers * 4 * WIDTH * WIDTH // 4,
                stage_bytes=4 * WIDTH * WIDTH,
            )
            for made in (self._plain, self._module):
                _pass(made, self._batch)

    def module_bytes(self) -> int:
        """What one forward and backward reads."""
        before = self._module.bytes_read
        _pass(self._module, self._batch)
        return int(self._module.bytes_read - before)

    def passes(self) -> Sample:
        with timed() as sample:
            _pass(self._module, self._batch)
        return sample

    def passes_in_memory(self) -> Sample:
        with timed() as sample:
            _pass(self._plain, self._batch)
        return sample

    def release(self) -> None:
        """Give everything back."""
        for each in (self._optimizer, self._unchecked, self._half, self._module):
            if each is not None:
                each.close()
        self._optimizer = self._unchecked = self._memory = None
        self._half = self._module = self._plain = None
        gc.collect()

    def close(self) -> None:
        self.release()


def _stepped(
    weights: list[torch.nn.Parameter], folder: Path, group: int, **options: Any
) -> SwappedOptimizer:
    """A swapped optimizer that has been stepped twice."""
    made = SwappedOptimizer(
        torch.optim.AdamW,
        weights,
        swap_dir=folder,
        subgroup_bytes=12 * group,
        fused=True,
        **options,
    )
    for _ in range(2):
        made.step()
    return made


def _timed_step(optimizer: Any) -> Sample:
    # What makes the step before durable belongs beside a forward pass, which is not here.
    optimizer._swapper.store.settle()
    with timed() as sample:
        optimizer.step()
    sample.nbytes = optimizer.last_step.read_bytes + optimizer.last_step.written_bytes
    sample.extra = {"written": float(optimizer.last_step.written_bytes)}
    return sample


def _weights(parameters: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Of which there are so many elements in all, with gradients."""
    found = []
    for _ in range(max(1, parameters // WIDTH**2)):
        weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=dtype))
        weight.grad = torch.full_like(weight, 1e-3)
        found.append(weight)
    return found


def _layers(count: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def _pass(module: Any, batch: torch.Tensor) -> None:
    module(batch).square().mean().backward()
    for parameter in module.parameters():
        parameter.grad = None


def _folder(directory: str, name: str) -> str:
    path = Path(directory) / f"swap-{name}"
    path.mkdir(exist_ok=True)
    return str(path)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
