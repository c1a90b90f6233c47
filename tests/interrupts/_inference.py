"""Models whose weights stay on disk, disturbed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from interrupts._trials import Scenario, Skip
from torch import nn

import nvmeio
from nvmeio.inference._plan import units


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)) for _ in range(5)
        )
        self.exit = nn.Linear(48, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.exit(x)
        return found


def everything_streams() -> None:
    """Models of tests are so small that they would be kept as the small parts of larger ones."""
    units.SMALL_BYTES = 1024


def saved_net(path: Path) -> Net:
    torch.manual_seed(0)
    whole = Net().eval()
    nvmeio.save_safetensors(whole.state_dict(), path)
    return whole


class Forward(Scenario):
    modes: ClassVar[tuple[str, ...]] = ("timer", "opcodes", "hooks", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        everything_streams()
        self.whole = saved_net(folder / "net.safetensors")
        self.x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        self.model = self.open()
        self.model.blocks[1].register_forward_pre_hook(lambda *_: self.poke())
        self.model.blocks[3][0].register_forward_hook(lambda *_: self.poke())

    def open(self) -> Any:
        with torch.device("meta"):
            empty = Net().eval()
        return nvmeio.stream_model(
            empty,
            self.folder / "net.safetensors",
            resident_bytes=160_000,
            window=2,
            handle=self.given,
        )

    @torch.no_grad()
    def work(self) -> Any:
        return self.model(self.x)

    @torch.no_grad()
    def check(self, found: Any) -> None:
        assert torch.equal(found, self.whole(self.x))

    def close(self) -> None:
        self.model.weight_stream.close()


class Backward(Forward):
    """Gradients of an adapter, through layers that come back for it."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.model.blocks[4][2].register_full_backward_hook(lambda *_: self.poke())

    def open(self) -> Any:
        with torch.device("meta"):
            empty = Net().eval()
        path = self.folder / "net.safetensors"
        return nvmeio.stream_model(
            empty, path, resident_bytes=160_000, window=2, handle=self.given, trainable=True
        )

    def gradient(self, model: Any) -> Any:
        x = self.x.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
        return found

    def work(self) -> Any:
        with torch.enable_grad():  # whatever an interrupt left
            return self.gradient(self.model)

    def check(self, found: Any) -> None:
        with torch.enable_grad():
            assert torch.equal(found, self.gradient(self.whole.requires_grad_(False)))


class AsyncForward(Forward):
    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        with torch.no_grad():
            return await self.model.weight_stream.run(self.model, self.x)


class Streams(Forward):
    """From opening a stream to closing it, and opening it again."""

    modes = ("timer", "opcodes", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.model.weight_stream.close()

    @torch.no_grad()
    def work(self) -> Any:
        model = self.open()
        with model.weight_stream:
            model(self.x)
        model.weight_stream.reopen()
        try:
            return model(self.x)
        finally:
            model.weight_stream.close()


def saved_model(folder: Path, kind: str, **sizes: int) -> Any:
    try:
        import transformers
        from inference import _models
    except BaseException as missing:  # pytest's Skipped is none of Exception
        raise Skip(f"transformers is not installed: {missing}") from None
    transformers.logging.set_verbosity_error()
    make = getattr(_models, kind)
    _models.saved(lambda: make(**sizes), folder)
    return _models


def saved_llama(folder: Path) -> Any:
    return saved_model(folder, "llama", layers=3, width=32)


class Generate(Scenario):
    modes = ("timer", "opcodes", "twice")

    def __init__(
        self, folder: Path, handle: nvmeio.AioHandle | None = None, **options: Any
    ) -> None:
        super().__init__(folder, handle)
        everything_streams()
        self.models = saved_llama(folder / "model")
        self.ids = self.models.prompt()
        self.wanted = self.models.tokens(self.models.loaded(folder / "model"), self.ids, 3)
        self.model = nvmeio.stream_model(
            folder / "model", resident_bytes=100_000, handle=handle, **options
        )

    def work(self) -> Any:
        return self.models.tokens(self.model, self.ids, 3)

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.wanted)

    def close(self) -> None:
        self.model.weight_stream.close()


class GenerateWithExperts(Scenario):
    """A cache of experts that holds a little more than one layer of four needs."""

    modes: tuple[str, ...] = ("timer", "opcodes", "twice")
    dtype: torch.dtype | None = None

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        path = folder / "model"
        self.models = saved_model(path, "mixtral", experts=8, width=32, intermediate_size=256)
        self.ids = self.models.prompt(batch=1, length=2)
        whole = self.models.loaded(path, dtype=self.dtype or torch.float32)
        self.wanted = self.models.tokens(whole, self.ids, 4)
        self.model = nvmeio.stream_model(
            path, resident_bytes="900K", dtype=self.dtype, handle=handle
        )
        assert self.model.weight_stream.experts

    def work(self) -> Any:
        return self.models.tokens(self.model, self.ids, 4)

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.wanted)
        assert self.model.weight_stream.stats.experts.evictions

    def close(self) -> None:
        self.model.weight_stream.close()


class GenerateWithConvertedExperts(GenerateWithExperts):
    """Their reads begin while the call computes."""

    dtype = torch.bfloat16


class TrainOverExperts(GenerateWithExperts):
    """Gradients of what is below the experts, which backward has from the cache again."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        path = folder / "model"
        self.models = saved_model(path, "mixtral", experts=8, width=32, intermediate_size=256)
        self.ids = self.models.prompt(batch=1, length=2)
        self.inputs = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
        whole = self.models.loaded(path).requires_grad_(False)
        self.wanted = self._gradient(whole)
        self.model = nvmeio.stream_model(path, resident_bytes="900K", trainable=True, handle=handle)
        assert self.model.weight_stream.experts
        for layer in self.model.model.layers:
            layer.mlp.experts.act_fn.register_forward_hook(lambda *_: self.poke())

    modes = ("timer", "opcodes", "hooks", "twice")

    def _gradient(self, model: Any) -> torch.Tensor:
        inputs = self.inputs.clone().requires_grad_(True)
        model(inputs_embeds=inputs).logits.square().mean().backward()
        assert inputs.grad is not None
        return inputs.grad

    def work(self) -> Any:
        return self._gradient(self.model)


class Pack(Scenario):
    """The packed directory is there and whole, or not there."""

    modes = ("timer", "opcodes", "hooks", "twice")
    options: dict[str, Any] = {}  # noqa: RUF012 - read only

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.save(folder / "model")
        self.out = folder / "packed"
        self.wanted = ""

    def save(self, folder: Path) -> None:
        saved_llama(folder)

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def work(self) -> Any:
        from nvmeio.inference import pack

        told: Any = {"progress": lambda *_: self.poke(), **self.options}
        pack(self.folder / "model", self.out, handle=self.given, **told)

    def again(self) -> Any:
        if not self.out.exists():
            self.work()

    def check(self, found: Any) -> None:
        files = sorted(path for path in self.out.rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        self.wanted = self.wanted or digest
        assert digest == self.wanted, files
        assert sorted(path.name for path in self.folder.iterdir()) == ["model", "packed"]


class PackExperts(Pack):
    """The same of a mixture, whose experts are quantised and written some at a time."""

    options: dict[str, Any] = {"quant_bits": 8, "quant_group_size": 32}  # noqa: RUF012

    def save(self, folder: Path) -> None:
        saved_model(folder, "mixtral", experts=8, width=32, intermediate_size=256)


SCENARIOS: dict[str, type[Scenario]] = {
    "stream-forward": Forward,
    "stream-backward": Backward,
    "stream-async": AsyncForward,
    "streams": Streams,
    "stream-generate": Generate,
    "stream-experts": GenerateWithExperts,
    "stream-converted-experts": GenerateWithConvertedExperts,
    "stream-trained-experts": TrainOverExperts,
    "packing": Pack,
    "packing-experts": PackExperts,
}
