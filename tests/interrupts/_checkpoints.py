"""Checkpoints of every format, disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from interrupts._trials import Scenario

import nvmeio

State = dict[str, Any]


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"w{n}": torch.randn(97, 101, generator=generator) for n in range(6)}
    return {**weights, "view": weights["w0"][:3], "half": weights["w1"].half(), "step": seed}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    found = state(seed)
    return {name: found[name].clone() for name in found if name != "step"}


def assert_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys(), found.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


class Save(Scenario):
    """Over a file that exists: it is the old one or the new one, and nothing is left beside it."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.saved = 0
        self.path = folder / "state.pt"
        torch.save(state(0), self.path)

    def prepare(self) -> None:
        self.saved += 1

    def work(self) -> Any:
        nvmeio.save(state(self.saved), self.path, handle=self.given)

    def again(self) -> Any:
        found = torch.load(self.path)
        assert found["step"] in (self.saved - 1, self.saved)
        assert_same(found, state(found["step"]))
        return self.work()

    def check(self, found: Any) -> None:
        assert_same(torch.load(self.path), state(self.saved))
        self.alone("state.pt")

    def alone(self, name: str) -> None:
        """Nothing lies beside it; what a second Ctrl-C left to itself is given time."""
        self.until(lambda: [path.name for path in self.folder.iterdir()] == [name])


class AsyncSave(Save):
    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        await nvmeio.async_save(state(self.saved), self.path, handle=self.given)


class Load(Scenario):
    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.path = folder / "state.pt"
        nvmeio.save(state(), self.path)

    def work(self) -> Any:
        return nvmeio.load(self.path, handle=self.given)

    def check(self, found: Any) -> None:
        assert_same(found, state())


class AsyncLoad(Load):
    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        return await nvmeio.async_load(self.path, handle=self.given)


class SafetensorsSave(Save):
    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        self.saved = 0
        self.path = folder / "state.safetensors"
        nvmeio.save_safetensors(tensors(0), self.path)

    def work(self) -> Any:
        nvmeio.save_safetensors(tensors(self.saved), self.path, handle=self.given)

    def again(self) -> Any:
        found = nvmeio.load_safetensors(self.path)
        old = torch.equal(found["w0"], tensors(self.saved - 1)["w0"])
        assert_same(found, tensors(self.saved - old))
        return self.work()

    def check(self, found: Any) -> None:
        assert_same(nvmeio.load_safetensors(self.path), tensors(self.saved))
        self.alone("state.safetensors")


class SafetensorsLoad(Load):
    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        self.path = folder / "state.safetensors"
        nvmeio.save_safetensors(tensors(), self.path)

    def work(self) -> Any:
        return nvmeio.load_safetensors(self.path, handle=self.given)

    def check(self, found: Any) -> None:
        assert_same(found, tensors())


def wraps(error: BaseException, wanted: type[BaseException]) -> bool:
    """Whether torch raised an error of its own in place of what disturbed it."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, wanted):
            return True
        # A CheckpointException of DCP names what each rank met.
        for met, _ in getattr(chain, "failures", {}).values():
            if isinstance(met, wanted):
                return True
        chain = chain.__cause__ or chain.__context__
    return False


class FileObject(Save):
    """torch.save through a FastFileWriter."""

    def is_interruption(self, error: BaseException, wanted: type[BaseException]) -> bool:
        return wraps(error, wanted)

    def work(self) -> Any:
        with nvmeio.FastFileWriter(self.path, handle=self.given) as file:
            torch.save(state(self.saved), file)


class CheckpointerSave(Scenario):
    """Saves in the background, waited for."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.step = 0
        self.checkpointer = nvmeio.Checkpointer(folder / "saved", keep=2, handle=handle)

    def prepare(self) -> None:
        self.step += 1

    def work(self) -> Any:
        self.checkpointer.save_sync(state(self.step), self.step)
        self.checkpointer.wait_sync()

    def again(self) -> Any:
        self.whole(self.step - 1)
        return self.work()

    def whole(self, least: int) -> None:
        """Whatever is found is whole."""
        if self.checkpointer.latest_step() is not None:
            found = self.checkpointer.restore()
            assert found["step"] >= least, f"{found['step']}, and {least} was durable"
            assert_same(found, state(found["step"]))

    def check(self, found: Any) -> None:
        assert self.checkpointer.latest_step() == self.step
        self.whole(self.step)

    def close(self) -> None:
        self.checkpointer.close()


class CheckpointerStep(CheckpointerSave):
    """The state stays where it lies, protected, and an optimizer's step comes meanwhile.

    All elements have one value, which is saved beside them, and a step adds one in a single call
    of C.
    """

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.weights = [torch.nn.Parameter(torch.zeros(97, 1101)) for _ in range(6)]
        self.optimizer = torch.optim.SGD(self.weights, lr=1.0, fused=True)
        for weight in self.weights:
            weight.grad = torch.full_like(weight, -1)

    def work(self) -> Any:
        value = float(self.weights[0].detach()[0, 0])
        saved = {"step": self.step, "value": value, "weights": self.weights}
        self.checkpointer.save_sync(saved, self.step)
        self.optimizer.step()
        self.checkpointer.wait_sync()
        assert float(self.weights[0].detach()[0, 0]) == value + 1

    def whole(self, least: int) -> None:
        if self.checkpointer.latest_step() is not None:
            found = self.checkpointer.restore()
            assert found["step"] >= least, f"{found['step']}, and {least} was durable"
            for weight in found["weights"]:
                assert torch.equal(weight, torch.full_like(weight, found["value"]))


class CheckpointerAsync(CheckpointerSave):
    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        await self.checkpointer.save(state(self.step), self.step)
        await self.checkpointer.wait()


class CheckpointerRestore(CheckpointerSave):
    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.checkpointer.save_sync(state(1), 1)
        self.checkpointer.wait_sync()

    def prepare(self) -> None:
        pass

    def work(self) -> Any:
        return self.checkpointer.restore()

    def again(self) -> Any:
        return self.work()

    def check(self, found: Any) -> None:
        assert_same(found, state(1))


class Checkpointers(Scenario):
    """One from its making to its end, in a directory that has one checkpoint more each time."""

    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.step = 0

    def prepare(self) -> None:
        self.step += 1

    async def awork(self) -> Any:
        async with nvmeio.Checkpointer(
            self.folder / "saved", keep=1, handle=self.given, overwrite=True
        ) as checkpointer:
            await checkpointer.save(state(self.step), self.step)
        with_ = nvmeio.Checkpointer(self.folder / "saved", keep=1, handle=self.given)
        try:
            return with_.restore()
        finally:
            with_.close()

    def again(self) -> Any:
        return self.patiently(self.work)

    def check(self, found: Any) -> None:
        assert_same(found, state(self.step))


class Dcp(Scenario):
    """torch.distributed.checkpoint, saved and loaded."""

    def is_interruption(self, error: BaseException, wanted: type[BaseException]) -> bool:
        return wraps(error, wanted)

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.saved = 0

    def prepare(self) -> None:
        self.saved += 1
        shutil.rmtree(self.folder / "saved", ignore_errors=True)

    def work(self) -> Any:
        import torch.distributed.checkpoint as dcp

        from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

        place, found = self.folder / "saved", tensors(0)
        dcp.save(
            tensors(self.saved),
            storage_writer=NvmeStorageWriter(place, handle=self.given),
            no_dist=True,
        )
        dcp.load(found, storage_reader=NvmeStorageReader(place, handle=self.given), no_dist=True)
        return found

    def check(self, found: Any) -> None:
        assert_same(found, tensors(self.saved))


SCENARIOS: dict[str, type[Scenario]] = {
    "save": Save,
    "save-async": AsyncSave,
    "load": Load,
    "load-async": AsyncLoad,
    "safetensors-save": SafetensorsSave,
    "safetensors-load": SafetensorsLoad,
    "file-object": FileObject,
    "checkpointer-save": CheckpointerSave,
    "checkpointer-step": CheckpointerStep,
    "checkpointer-async": CheckpointerAsync,
    "checkpointer-restore": CheckpointerRestore,
    "checkpointers": Checkpointers,
    "dcp": Dcp,
}
