"""SwappedOptimizer whose class steps on a device: the weights of the class with all in memory.

A step is asked of the device whole, so whatever the pace of its streams, a wait that is missing
changes the numbers (`fake_accelerator` says how).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, EVERY_PACE, Accelerator, Pace, accelerator
from support import PATIENCE_S, collect
from test_module_on_device import WIDTH, model, swapped

import nvmeio
from nvmeio._memory import devices
from nvmeio.offload import SwappedOptimizer
from nvmeio.offload._swap_files.pipeline import DeviceTurns
from nvmeio.offload._swap_files.subgroups import SlotRun

STEPS = 2


class Counts(torch.optim.Optimizer):
    """Momentum, with a number beside it that the class keeps where the parameter is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["seen"] = p.new_zeros(())
                    state["mean"] = torch.zeros_like(p)
                state["seen"] += p.grad.abs().sum()
                state["mean"].lerp_(p.grad, 0.5)
                p.addcdiv_(state["mean"], state["seen"] + 1, value=-group["lr"])


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam-fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "adam-foreach": (torch.optim.Adam, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "foreach": True}),  # as by default on devices
    "counts": (Counts, {"lr": 0.1}),
}


def gradients_of(made: Any, place: Callable[[torch.Tensor], torch.Tensor], step: int) -> None:
    """Those of two micro-batches."""
    dtype = next(made.parameters()).dtype
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * step + number)
        x = torch.randn(3, WIDTH, generator=generator).to(dtype)
        made(place(x)).float().square().mean().backward()


def stepped(
    made: Any, optimizer: Any, place: Callable[[torch.Tensor], torch.Tensor], first: int = 0
) -> None:
    for step in range(first, first + STEPS):
        gradients_of(made, place, step)
        optimizer.step()
        optimizer.zero_grad()


def on_device(cuda: Accelerator, made: Any) -> Any:
    """The same module with its parameters on the device."""
    for each in made.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not cuda.has(parameter):
                each._parameters[name] = torch.nn.Parameter(cuda.tensor(parameter))
        for name, buffer in each._buffers.items():
            each._buffers[name] = cuda.tensor(buffer)
    return made


def plain(cuda: Accelerator, dtype: torch.dtype = torch.float32) -> Any:
    made = model(2, dtype)
    last = on_device(cuda, made[-1])
    on_device(cuda, made)
    assert made[-1] is last is made[1]
    return made


def in_memory(kind: str, steps: int = STEPS) -> Any:
    made = model(2)
    optimizer_class, options = CLASSES[kind]
    optimizer = optimizer_class(made.parameters(), **options)
    for step in range(steps):
        gradients_of(made, lambda x: x, step)
        optimizer.step()
        optimizer.zero_grad()
    return made


def swapped_optimizer(kind: str, made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    optimizer_class, arguments = CLASSES[kind]
    return SwappedOptimizer(
        optimizer_class,
        made.parameters(),
        swap_dir=folder,
        **{
            "device": "cuda",
            "subgroup_bytes": 32 << 10,
            "durable": False,
            **arguments,
            **options,
        },
    )


def assert_weights(cuda: Accelerator, found: Any, wanted: Any) -> None:
    theirs = wanted.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.equal(cuda.value(tensor), theirs[name]), name


@pytest.mark.parametrize("pace", EVERY_PACE, ids=lambda p: "-".join(e.name.lower() for e in p))
@pytest.mark.parametrize(("home", "gradients"), [("device", "memory"), ("drive", "disk")])
def test_a_step_on_the_device_equals_the_class_in_memory(
    home: str,
    gradients: str,
    pace: tuple[Pace, Pace],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    wanted = in_memory("adamw")
    with accelerator(monkeypatch, *pace) as cuda:
        made: Any = swapped(model(2), tmp_path) if home == "drive" else plain(cuda)
        with swapped_optimizer("adamw", made, tmp_path, gradients=gradients) as optimizer:
            stepped(made, optimizer, cuda.tensor)
            assert_weights(cuda, made, wanted)
            plan = optimizer.plan
            assert plan.subgroups >= 4
            assert plan.buffers == 4
            assert plan.device_bytes == 2 * plan.buffer_bytes
            assert "iB of the device's" in str(plan)
        if home == "drive":
            made.close()


@pytest.mark.parametrize("kind", CLASSES)
def test_every_sort_of_class_steps_there(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = in_memory(kind, 2 * STEPS)
    with accelerator(monkeypatch) as cuda:
        made = plain(cuda)
        with swapped_optimizer(kind, made, tmp_path) as optimizer:
            stepped(made, optimizer, cuda.tensor)
            saved = {
                "state": {
                    n: {k: cuda.value(v) if torch.is_tensor(v) else v for k, v in each.items()}
                    for n, each in optimizer.state_dict()["state"].items()
                },
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        again = tmp_path / "again"
        again.mkdir()
        with swapped_optimizer(kind, made, again) as optimizer:
            optimizer.load_state_dict(saved)
            stepped(made, optimizer, cuda.tensor, first=STEPS)
            assert_weights(cuda, made, wanted)


@pytest.mark.parametrize(
    ("ratio", "gradients", "home"),
    [
        (1.0, "memory", "device"),
        (1.0, "disk", "drive"),
        (1.0, "disk", "device"),
        (0.5, "memory", "drive"),
        (0.0, "disk", "device"),
    ],
)
def test_bf16_with_masters_equals_the_step_on_the_cpu(
    ratio: float, gradients: str, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clipped, over micro-batches, with a part of the state in memory."""
    options: dict[str, Any] = {
        "master_dtype": torch.float32,
        "gradients": gradients,
        "ratio": ratio,
    }

    def train(made: Any, optimizer: Any, place: Any) -> None:
        for step in range(STEPS):
            gradients_of(made, place, step)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    theirs = model(2, torch.bfloat16)
    (tmp_path / "theirs").mkdir()
    with swapped_optimizer(
        "adamw", theirs, tmp_path / "theirs", device="cpu", **options
    ) as optimizer:
        train(theirs, optimizer, lambda x: x)
    with accelerator(monkeypatch) as cuda:
        ours = model(2, torch.bfloat16)
        made: Any = swapped(ours, tmp_path) if home == "drive" else plain(cuda, torch.bfloat16)
        with swapped_optimizer("adamw", made, tmp_path, **options) as optimizer:
            train(made, optimizer, cuda.tensor)
            assert_weights(cuda, made, theirs)
        if home == "drive":
            made.close()


def test_parameters_that_stay_on_the_device_are_not_copied_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Moments come up and go down; a weight only goes down, for its copy on the drive."""
    for recoverable, down in ((True, 12), (False, 8)):
        folder = tmp_path / str(recoverable)
        folder.mkdir()
        with monkeypatch.context() as patch, accelerator(patch) as cuda:
            made = plain(cuda)
            with swapped_optimizer("adamw", made, folder, recoverable=recoverable) as optimizer:
                stepped(made, optimizer, cuda.tensor)
                moved = {"up": 0, "down": 0}

                def count(
                    target: torch.Tensor, source: torch.Tensor, cuda: Any = cuda, to: Any = moved
                ) -> None:
                    to["up" if cuda.has(target) else "down"] += source.nbytes
                    cuda.begin_copy(target, source)

                patch.setattr(devices, "begin_copy", count)
                stepped(made, optimizer, cuda.tensor, first=STEPS)
                patch.setattr(devices, "begin_copy", cuda.begin_copy)
                bytes_of = sum(p.nbytes for p in made.parameters()) * STEPS // 4
                # Up to 4 more for the gaps that align them.
                assert 8 <= moved["up"] / bytes_of < 12
                assert down <= moved["down"] / bytes_of < down + 4
                assert optimizer.plan.read_bytes == 8 * bytes_of // STEPS


def scaled_steps(made: Any, optimizer: Any, place: Any, overflows: int, clip: Any = None) -> Any:
    """Of a GradScaler; one of them overflows, and is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        loss = made(place(torch.randn(3, WIDTH, generator=generator))).square().mean()
        if step == overflows:
            loss = loss * 1e38
        scaler.scale(loss).backward()
        if clip is not None:
            clip(scaler, optimizer)
        before = files_of(optimizer)
        scaler.step(optimizer)
        if step == overflows:
            assert files_of(optimizer) == before
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


def files_of(optimizer: Any) -> Any:
    if not isinstance(optimizer, SwappedOptimizer):
        return None
    folder = Path(optimizer.swap_dir)
    files = [folder / name for name in ("state.0", "state.1")]
    manifests = sorted(folder.glob("manifest*"))
    assert manifests
    return optimizer.generation, [path.read_bytes() for path in [*files, *manifests]]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("home", "gradients"), [("device", "memory"), ("drive", "disk")])
def test_a_grad_scaler_equals_that_of_training_in_memory(
    home: str, gradients: str, clips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step that overflowed leaves weights, state and files as they were."""

    def clip(scaler: Any, optimizer: Any) -> None:
        if isinstance(optimizer, SwappedOptimizer) and gradients == "disk":
            optimizer.clip_grad_norm_(0.5, scaler=scaler)
            return
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)

    theirs = model(2)
    optimizer_class, arguments = CLASSES["adamw"]
    how = clip if clips else None
    wanted = scaled_steps(
        theirs, optimizer_class(theirs.parameters(), **arguments), lambda x: x, 2, how
    )
    with accelerator(monkeypatch) as cuda:
        made: Any = swapped(model(2), tmp_path) if home == "drive" else plain(cuda)
        with swapped_optimizer("adamw", made, tmp_path, gradients=gradients) as optimizer:
            assert scaled_steps(made, optimizer, cuda.tensor, 2, how) == wanted
            assert optimizer.generation == 4
            assert_weights(cuda, made, theirs)
            if gradients == "disk":
                with pytest.raises(RuntimeError, match=r"leave it out, and clip with optimizer"):
                    scaled_steps(
                        made, optimizer, cuda.tensor, -1, lambda scaler, opt: scaler.unscale_(opt)
                    )
                assert optimizer.generation == 4
        if home == "drive":
            made.close()


def test_device_bytes_bounds_what_the_buffers_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with accelerator(monkeypatch) as cuda:
        made = plain(cuda)
        before = cuda.in_use_bytes
        budget = 96 << 10
        with swapped_optimizer(
            "adamw", made, tmp_path, subgroup_bytes="1MiB", device_bytes=budget
        ) as optimizer:
            assert 0 < optimizer.plan.device_bytes <= budget
            assert cuda.in_use_bytes - before == optimizer.plan.device_bytes
            stepped(made, optimizer, cuda.tensor)
            assert_weights(cuda, made, in_memory("adamw"))
        with pytest.raises(ValueError, match=r"device_bytes=4096 is too small: 2 buffers"):
            swapped_optimizer("adamw", made, tmp_path, device_bytes=4096)


def test_impossible_devices_and_buffers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"device_bytes is memory of a CUDA device"):
        swapped_optimizer("sgd", model(2), tmp_path, device="cpu", device_bytes="1MiB")
    with accelerator(monkeypatch) as cuda:
        with pytest.raises(ValueError, match=r"parameter 0 is on cpu, and is to be stepped on cud"):
            swapped_optimizer("sgd", model(2), tmp_path)
        made = plain(cuda)
        cuda.limit_bytes = cuda.in_use_bytes + 1000
        with pytest.raises(MemoryError, match=r"cuda:0 has no room for 2 buffers of \d+ bytes"):
            swapped_optimizer("sgd", made, tmp_path)
        cuda.limit_bytes = 1 << 28
        with swapped_optimizer("sgd", made, tmp_path) as optimizer:
            stepped(made, optimizer, cuda.tensor)
            assert_weights(cuda, made, in_memory("sgd"))


@pytest.mark.parametrize(
    ("home", "before"), [("device", "cuda"), ("drive", "cuda"), ("device", "cpu")]
)
def test_a_killed_training_goes_on(
    home: str, before: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is on the drive after a step is all that the next process has, whoever made it."""
    wanted = in_memory("adam-fused", 2 * STEPS)
    with accelerator(monkeypatch) as cuda:
        for first in (0, STEPS):
            made: Any = swapped(model(2), tmp_path) if home == "drive" else plain(cuda)
            options = {"resume": True, "device": "cuda" if first else before}
            with swapped_optimizer("adam-fused", made, tmp_path, **options) as optimizer:
                assert optimizer.resumed == bool(first)
                stepped(made, optimizer, cuda.tensor, first)
                if first:
                    assert_weights(cuda, made, wanted)
            if home == "drive":
                made.close()


@pytest.mark.parametrize("pace", [(Pace.EAGER, Pace.LAZY), (Pace.LAZY, Pace.EAGER)])
def test_a_step_comes_after_the_copies_of_a_save(
    pace: tuple[Pace, Pace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a step in place changes on the device is saved as it was before."""
    with accelerator(monkeypatch, *pace) as cuda:
        made = plain(cuda)
        optimizer = swapped_optimizer("adamw", made, tmp_path)
        with optimizer, nvmeio.Checkpointer(tmp_path / "saved") as checkpointer:
            for step in range(STEPS):
                gradients_of(made, cuda.tensor, step)
                state = {"model": made.state_dict(), "optimizer": optimizer.state_dict()}
                checkpointer.save_sync(state, step)
                optimizer.step()
                optimizer.zero_grad()
                report = checkpointer.wait_sync(PATIENCE_S)
                assert report is not None and report.guarded_bytes > 0
            assert_weights(cuda, made, in_memory("adamw"))
            for step in range(STEPS):
                saved, before = checkpointer.restore(step, "cpu"), in_memory("adamw", step)
                for name, tensor in before.state_dict().items():
                    assert torch.equal(saved["model"][name], tensor), (step, name)
                assert bool(saved["optimizer"]["state"]) == bool(step)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_a_step_whose_copy_fails_has_not_happened(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = in_memory("adamw")
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda:
        made = plain(cuda)
        with swapped_optimizer("adamw", made, tmp_path) as optimizer:
            gradients_of(made, cuda.tensor, 0)
            first = len(cuda.copies)

            def fail(copy: int) -> None:
                if copy == first + number:
                    cuda.before_begin = lambda copy: None
                    raise RuntimeError("CUDA error: the copy failed")

            cuda.before_begin = fail
            with pytest.raises(RuntimeError, match="the copy failed"):
                optimizer.step()
            assert optimizer.generation == 1
            assert not optimizer.broken
            streams: Any = cuda.streams
            assert all(stream.done == stream.asked for stream in streams)
            assert_weights(cuda, made, model(2))
            optimizer.step()
            optimizer.zero_grad()
            for step in range(1, STEPS):
                gradients_of(made, cuda.tensor, step)
                optimizer.step()
                optimizer.zero_grad()
            assert_weights(cuda, made, wanted)


def test_a_step_that_failed_keeps_no_memory_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The class had views of the buffers until its next step, if there was one."""

    def fail(self: Any) -> None:
        raise KeyError

    with accelerator(monkeypatch) as cuda:
        made = plain(cuda)
        before = cuda.in_use_bytes
        optimizer = swapped_optimizer("adamw", made, tmp_path)
        stepped(made, optimizer, cuda.tensor)
        gradients_of(made, cuda.tensor, STEPS)
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", fail)
            with pytest.raises(KeyError):
                optimizer.step()
        optimizer.zero_grad()
        optimizer.close()
        collect()
        cuda.take_back(waits=True)
        assert cuda.in_use_bytes == before


def test_a_device_that_fails_while_results_are_awaited_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with accelerator(monkeypatch) as cuda:
        made = plain(cuda)
        with swapped_optimizer("adamw", made, tmp_path) as optimizer:
            gradients_of(made, cuda.tensor, 0)
            cuda.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
            with pytest.raises(RuntimeError, match="illegal memory access"):
                optimizer.step()
            cuda.failure = None
            assert optimizer.generation == 1


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for what comes up", Pace.EAGER, Pace.LAZY),
        ("what goes down does not wait for compute", Pace.LAZY, Pace.EAGER),
        ("writes do not wait for what comes down", Pace.LAZY, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str, compute: Pace, copies: Pace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the tests of equality rest on."""
    wanted = in_memory("adamw").state_dict()
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        made = plain(cuda)
        with swapped_optimizer("adamw", made, tmp_path, checksum=False) as optimizer:
            if missing == "compute does not wait for what comes up":
                patch.setattr(devices, "come_after", lambda stream, mark: None)
            elif missing == "what goes down does not wait for compute":
                patch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
            else:
                patch.setattr(devices.CudaMark, "wait", lambda self: None)
            stepped(made, optimizer, cuda.tensor)
            found = made.state_dict()
            assert not all(torch.equal(cuda.value(found[n]), t) for n, t in wanted.items())
        assert cuda.forgive()


@pytest.mark.parametrize("is_right", [True, False])
def test_what_comes_up_waits_for_the_turn_before_in_its_buffer(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes up is eager, and compute in the same memory is not, nor what goes down."""
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        if not is_right:
            monkeypatch.setattr(devices.Beside, "after", lambda self, mark: None)
        turns = DeviceTurns(DEVICE)
        down: Any = cuda.streams[1]
        down.pace = Pace.LAZY
        turns.make(4096, 2)
        slots = [torch.full((4096,), number, dtype=torch.uint8) for number in range(6)]

        def compute(memory: torch.Tensor) -> list[SlotRun]:
            memory.add_(100)
            return [SlotRun(0, 4096)]

        for slot in slots:
            turns.begin(slot, [SlotRun(0, 4096)], compute)
        turns.settle()
        found = [bool((slot == 100 + number).all()) for number, slot in enumerate(slots)]
        assert all(found) == is_right
        assert bool(cuda.forgive()) != is_right


@pytest.mark.parametrize(
    ("case", "is_right"), [("failed", True), ("failed", False), ("made again", True)]
)
def test_a_buffer_is_not_filled_while_an_earlier_turn_may_look_at_it(
    case: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that failed left no mark behind, nor did whoever had the memory before."""
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        turns = DeviceTurns(DEVICE)
        down: Any = cuda.streams[1]
        down.pace = Pace.LAZY
        turns.make(4096, 1)
        seen = cuda.tensor(torch.zeros(4096, dtype=torch.uint8))

        def look(memory: torch.Tensor) -> list[SlotRun]:
            seen.copy_(memory)
            if case == "failed":
                raise KeyError
            return []

        whole = [SlotRun(0, 4096)]
        if not is_right:
            monkeypatch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
        with contextlib.suppress(KeyError):
            turns.begin(torch.full((4096,), 1, dtype=torch.uint8), whole, look)
        if case == "failed":
            turns.settle()
        else:
            turns.free()
            turns.make(4096, 1)
        turns.begin(torch.full((4096,), 2, dtype=torch.uint8), whole, lambda memory: [])
        assert bool((cuda.value(seen) == 1).all()) == is_right
        assert bool(cuda.forgive()) != is_right
