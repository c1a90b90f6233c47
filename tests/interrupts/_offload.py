"""Training with its state on the drive, disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from in_rows import InRows
from inside import store_of
from interrupts._trials import Scenario
from offload import _mixtures
from offload._offload_models import WithMasters

import nvmeio
from nvmeio.offload import SwappedActivations, SwappedModule, SwappedOptimizer

WIDTH, WIDE, ROWS = 24, 320, 64
CLASS, ARGUMENTS = torch.optim.AdamW, {"lr": 1e-2}


def net() -> torch.nn.Sequential:
    """Layers that are stages of their own, with weights that are the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(6))
    )


def wide_net() -> torch.nn.Sequential:
    """With a layer that has no room in the window of `swapped`."""
    return net().append(torch.nn.Linear(WIDTH, WIDE))


def wide_net_in_rows() -> torch.nn.Sequential:
    """What that computes once the layer is in tiles."""
    made: Any = wide_net()
    made[-1] = InRows(made[-1], ROWS)
    in_rows: torch.nn.Sequential = made
    return in_rows


def loss_of(made: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = made(torch.randn(4, WIDTH, generator=generator)).square().mean()
    return loss


class InMemory:
    """The same training in memory: weights and gradients after so many steps."""

    def __init__(self, make: Callable[[], torch.nn.Module] = net) -> None:
        self.made = make()
        self.optimizer: Any = CLASS(self.made.parameters(), **ARGUMENTS)
        self.weights = [self._weights()]
        self.gradients: list[list[torch.Tensor]] = []

    def _weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.made.parameters()]

    def _step(self) -> None:
        loss_of(self.made, len(self.gradients)).backward()
        self.gradients.append([p.grad.clone() for p in self.made.parameters()])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.weights.append(self._weights())

    def after(self, steps: int) -> list[torch.Tensor]:
        while len(self.gradients) < steps:
            self._step()
        return self.weights[steps]

    def gradients_of(self, step: int) -> list[torch.Tensor]:
        self.after(step + 1)
        return self.gradients[step]


def assert_same(found: Any, wanted: list[torch.Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"{what} of parameter {number} differ"


def swapped(made: torch.nn.Module, folder: Path, **options: Any) -> SwappedModule:
    whole = sum(p.nbytes for p in made.parameters())
    # Room for three of the six, so that they come and go.
    return SwappedModule(
        made, swap_dir=folder, resident_bytes=3 * 8192, stage_bytes=whole // 6 + 1, **options
    )


def resumed(made: torch.nn.Module, folder: Path, handle: Any = None) -> SwappedOptimizer:
    """An optimizer that goes on with what is in the folder, if something is."""
    return SwappedOptimizer(
        CLASS,
        made.parameters(),
        swap_dir=folder,
        subgroup_bytes=8192,
        resume=True,
        handle=handle,
        **ARGUMENTS,
    )


class Passes(Scenario):
    """Forward and backward through a window, gradients in memory."""

    modes = ("timer", "opcodes", "hooks", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.reference = InMemory()
        made = net()
        made[1].register_forward_pre_hook(lambda *_: self.poke())
        made[2].register_forward_hook(lambda *_: self.poke())
        made[4][0].register_full_backward_hook(lambda *_: self.poke())
        self.module = swapped(made, folder, handle=handle)

    def prepare(self) -> None:
        self.module.zero_grad()
        self.module.evict()

    def work(self) -> Any:
        loss = loss_of(self.module, 0)
        loss.register_hook(lambda _: self.poke())
        loss.backward()

    def again(self) -> Any:
        self.module.zero_grad()
        return self.work()

    def check(self, found: Any) -> None:
        wanted = self.reference.gradients_of(0)
        assert_same([p.grad for p in self.module.parameters()], wanted, "gradients")

    def close(self) -> None:
        self.module.close()


class Forward(Passes):
    """Without gradients."""

    modes = ("timer", "opcodes", "hooks", "twice")

    def work(self) -> Any:
        with torch.no_grad():
            return loss_of(self.module, 0)

    def again(self) -> Any:
        return self.work()

    def check(self, found: Any) -> None:
        with torch.no_grad():
            assert torch.equal(found, loss_of(self.reference.made, 0))


class MixturePasses(Passes):
    """Experts in lists, which are read where they are called."""

    modes = ("timer", "opcodes", "hooks", "twice")
    make = staticmethod(_mixtures.lists)

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        theirs, made = self.make(), self.make()
        _mixtures.loss_of(theirs, 0).backward()
        self.wanted = [p.grad for p in theirs.parameters()]
        made.layers[1].register_forward_pre_hook(lambda *_: self.poke())
        made.layers[1].mixture.register_full_backward_hook(lambda *_: self.poke())
        for each in made.layers[2].mixture.experts.modules():
            each.register_forward_hook(lambda *_: self.poke())
        window = sum(p.nbytes for p in made.parameters()) * 7 // 10
        self.module = SwappedModule(made, swap_dir=folder, resident_bytes=window, handle=handle)

    def work(self) -> Any:
        loss = _mixtures.loss_of(self.module, 0)
        loss.register_hook(lambda _: self.poke())
        loss.backward()

    def check(self, found: Any) -> None:
        for number, (p, grad) in enumerate(zip(self.module.parameters(), self.wanted, strict=True)):
            same = p.grad is grad if p.grad is None or grad is None else torch.equal(p.grad, grad)
            assert same, f"gradients of parameter {number} differ"


class FusedMixturePasses(MixturePasses):
    """Experts that are rows, of which those with tokens are read."""

    make = staticmethod(_mixtures.fused)


class Training(Scenario):
    """One step of training; `again` goes on from where the interruption left it."""

    gradients = "memory"
    swaps_module = False
    durable = False
    make, make_reference = staticmethod(net), staticmethod(net)

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.reference = InMemory(self.make_reference)
        made = self.make()
        self.inner = made
        self.module = swapped(made, folder, handle=handle) if self.swaps_module else made
        self.optimizer = SwappedOptimizer(
            CLASS,
            self.module.parameters(),
            swap_dir=folder,
            subgroup_bytes=8192,
            gradients=self.gradients,
            durable=self.durable,
            handle=handle,
            **ARGUMENTS,
        )

    @property
    def steps(self) -> int:
        return self.optimizer.generation - 1

    def weights(self) -> list[torch.Tensor]:
        if not self.swaps_module:
            return [p.detach() for p in self.module.parameters()]
        return [t.clone() for t in self.module.state_dict().values()]

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.module, self.steps).backward()

    def prepare(self) -> None:
        self.before = self.steps
        self.backward()

    def work(self) -> Any:
        self.optimizer.step()

    def again(self) -> Any:
        """A step is complete or has not happened, and then its gradients are still there."""
        if self.steps == self.before:
            self.work()

    def check(self, found: Any) -> None:
        assert self.steps == self.before + 1
        assert_same(self.weights(), self.reference.after(self.steps), "weights")

    def says_so(self, error: BaseException) -> bool:
        return super().says_so(error) or "broken" in str(error)

    def close(self) -> None:
        self.optimizer.close()
        if self.swaps_module:
            self.module.close()


class StepInMemory(Training):
    """Gradients in memory; durable."""

    durable = True


class StepOnDisk(Training):
    """Gradients and parameters on the drive."""

    gradients = "disk"
    swaps_module = True


class MixtureInMemory(InMemory):
    """Fused experts in bf16, stepped on masters."""

    def __init__(self) -> None:
        self.made = _mixtures.fused().to(torch.bfloat16)
        self.optimizer = WithMasters(self.made.parameters(), torch.optim.SGD, lr=0.1)
        self.weights = [self._weights()]
        self.gradients = []

    def _step(self) -> None:
        _mixtures.loss_of(self.made, len(self.gradients), 1).backward()
        self.gradients.append([])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.weights.append(self._weights())


class MixtureStep(Training):
    """Gradients, masters and weights on the drive; rows without tokens stay where they are."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        self.reference = MixtureInMemory()
        self.swaps_module = True
        made = _mixtures.fused().to(torch.bfloat16)
        window = sum(p.nbytes for p in made.parameters()) * 7 // 10
        self.module = SwappedModule(made, swap_dir=folder, resident_bytes=window, handle=handle)
        self.optimizer = SwappedOptimizer(
            torch.optim.SGD,
            self.module.parameters(),
            swap_dir=folder,
            subgroup_bytes=64 << 10,
            gradients="disk",
            master_dtype=torch.float32,
            durable=False,
            handle=handle,
            lr=0.1,
        )

    def backward(self) -> None:
        self.optimizer.zero_grad()
        _mixtures.loss_of(self.module, self.steps, 1).backward()


class AsyncStep(Training):
    awaits = True
    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return self.disturbance.run(self.optimizer.async_step())


class PassesOnDisk(StepOnDisk):
    """Forward and backward with gradients that are taken away; the step shows what they were."""

    modes = ("timer", "opcodes", "hooks", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.inner[1].register_forward_pre_hook(lambda *_: self.poke())
        self.inner[2].register_forward_hook(lambda *_: self.poke())
        self.inner[4][0].register_full_backward_hook(lambda *_: self.poke())

    def prepare(self) -> None:
        self.before = self.steps
        self.optimizer.zero_grad()

    def work(self) -> Any:
        loss_of(self.module, self.steps).backward()

    def again(self) -> Any:
        self.optimizer.zero_grad()
        self.work()

    def check(self, found: Any) -> None:
        self.optimizer.step()
        super().check(found)


class PassesInTiles(PassesOnDisk):
    """The same through a layer that is larger than the window."""

    make, make_reference = staticmethod(wide_net), staticmethod(wide_net_in_rows)

    def weights(self) -> list[torch.Tensor]:
        found = self.module.state_dict()
        rows = [found.pop(f"6.{name}").split(ROWS) for name in ("weight", "bias")]
        tiles = [tensor.clone() for tile in zip(*rows, strict=True) for tensor in tile]
        return [tensor.clone() for tensor in found.values()] + tiles


class Gather(StepOnDisk):
    """Weights changed by hand; those of before, or the new ones, each whole."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        Scenario.__init__(self, folder, handle)
        self.module = swapped(net(), folder, handle=handle)
        self.number = 0

    def prepare(self) -> None:
        self.number += 1

    def work(self) -> Any:
        with self.module.gather(*self.module.module[2].parameters()), torch.no_grad():
            for parameter in self.module.module[2].parameters():
                parameter.fill_(self.number)

    def again(self) -> Any:
        for name, tensor in self.module.state_dict().items():
            if name.startswith("2."):
                assert bool((tensor == tensor.flatten()[0]).all()) or self.number == 1, name
                assert not bool(tensor.isnan().any()), name
        self.work()

    def check(self, found: Any) -> None:
        wanted = net().state_dict()
        for name, tensor in self.module.state_dict().items():
            if name.startswith("2."):
                assert bool((tensor == self.number).all()), name
            else:
                assert torch.equal(tensor, wanted[name]), name
        with torch.no_grad():
            loss_of(self.module, 0)

    def close(self) -> None:
        self.module.close()


class Snapshot(Training):
    """A copy beside the training, from which another one resumes."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prepare(self) -> None:
        shutil.rmtree(self.folder / "copy", ignore_errors=True)

    def work(self) -> Any:
        self.optimizer.snapshot(self.folder / "copy")

    def again(self) -> Any:
        if not (self.folder / "copy").exists() or not any((self.folder / "copy").iterdir()):
            self.work()

    def check(self, found: Any) -> None:
        made = net()
        copy = resumed(made, self.folder / "copy", self.given)
        assert copy.resumed
        copy.close()
        assert_same([p.detach() for p in made.parameters()], self.reference.after(1), "weights")


class Resume(Scenario):
    """From making an optimizer that resumes to closing it."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.reference = InMemory()
        self.made = net()
        optimizer = self.open()
        loss_of(self.made, 0).backward()
        optimizer.step()
        optimizer.close()

    def open(self) -> SwappedOptimizer:
        return resumed(self.made, self.folder, self.given)

    def prepare(self) -> None:
        self.made = net()

    def work(self) -> Any:
        optimizer = self.open()
        try:
            return optimizer.generation, optimizer.resumed
        finally:
            optimizer.close()

    def again(self) -> Any:
        self.made = net()
        return self.patiently(self.work)

    def check(self, found: Any) -> None:
        assert found == (2, True)
        assert_same(
            [p.detach() for p in self.made.parameters()], self.reference.after(1), "weights"
        )


class LoadStateDict(Scenario):
    """The weights are all taken over, by the next call if not by this one."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.module = swapped(net(), folder, handle=handle)
        self.number = 0

    def prepare(self) -> None:
        self.number += 1
        self.state = {name: t + self.number for name, t in net().state_dict().items()}

    def work(self) -> Any:
        self.module.load_state_dict(self.state)

    def check(self, found: Any) -> None:
        reference = net()
        reference.load_state_dict(self.state)
        loss_of(reference, 0).backward()
        self.module.zero_grad()
        loss_of(self.module, 0).backward()
        wanted = [p.grad for p in reference.parameters()]
        assert_same([p.grad for p in self.module.parameters()], wanted, "gradients")

    def close(self) -> None:
        self.module.close()


class Modules(Scenario):
    """A module from the meta device, made part by part by the user's `init`, to its end."""

    modes = ("timer", "opcodes", "hooks", "twice")

    def init(self, part: torch.nn.Module) -> None:
        self.poke()
        with torch.no_grad():
            for number, parameter in enumerate(part.parameters(recurse=False)):
                parameter.fill_(number + 1)

    def work(self) -> Any:
        with torch.device("meta"):
            made = net()
        with (
            swapped(made, self.folder, init=self.init, handle=self.given) as module,
            torch.no_grad(),
        ):
            return loss_of(module, 0), {k: v.clone() for k, v in module.state_dict().items()}

    def again(self) -> Any:
        return self.patiently(self.work)

    def check(self, found: Any) -> None:
        loss, state = found
        assert bool(loss.isfinite())
        for name, tensor in state.items():
            assert bool((tensor == (1 if name.endswith("weight") else 2)).all()), name
        left = [p.name for p in self.folder.rglob("*") if p.is_file() and p.name != "lock"]
        assert not left, left


class Activations(Scenario):
    """Forward, whose saved tensors go to the drive, and backward, which has them read."""

    modes = ("timer", "opcodes", "hooks", "twice")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.reference = InMemory()
        self.made = net()
        self.made[1].register_forward_pre_hook(lambda *_: self.poke())
        self.made[4][0].register_full_backward_hook(lambda *_: self.poke())
        self.activations = SwappedActivations(
            swap_dir=folder, resident_bytes=8192, min_bytes=1, handle=handle
        )

    def prepare(self) -> None:
        self.made.zero_grad()

    def work(self) -> Any:
        with self.activations.saving():
            # Many more than the window holds, so that the first of them are written.
            losses = [loss_of(self.made, 0) for _ in range(4)]
        losses[0].register_hook(lambda _: self.poke())
        losses[0].backward()

    def again(self) -> Any:
        self.made.zero_grad()
        return self.work()

    def check(self, found: Any) -> None:
        wanted = self.reference.gradients_of(0)
        assert_same([p.grad for p in self.made.parameters()], wanted, "gradients")
        store = store_of(self.activations)
        self.until(lambda: store.in_memory_bytes + store.file.used_bytes == 0)

    def close(self) -> None:
        self.activations.close()


class ActivationsMade(Scenario):
    """From making it to closing it."""

    modes = ("timer", "opcodes")

    def work(self) -> Any:
        with SwappedActivations(swap_dir=self.folder, handle=self.given) as activations:
            return activations.resident_bytes

    def check(self, found: Any) -> None:
        assert found == 1 << 30
        assert not list(self.folder.iterdir())


SCENARIOS: dict[str, type[Scenario]] = {
    "swapped-activations": Activations,
    "swapped-activations-made": ActivationsMade,
    "swapped-module-forward": Forward,
    "swapped-module-passes": Passes,
    "swapped-module-passes-disk": PassesOnDisk,
    "swapped-module-passes-tiles": PassesInTiles,
    "swapped-module-mixture": MixturePasses,
    "swapped-module-mixture-fused": FusedMixturePasses,
    "swapped-module-gather": Gather,
    "swapped-optimizer-step": StepInMemory,
    "swapped-optimizer-step-disk": StepOnDisk,
    "swapped-optimizer-step-mixture": MixtureStep,
    "swapped-optimizer-async-step": AsyncStep,
    "swapped-optimizer-snapshot": Snapshot,
    "swapped-optimizer-resume": Resume,
    "swapped-modules": Modules,
    "swapped-module-load": LoadStateDict,
}
