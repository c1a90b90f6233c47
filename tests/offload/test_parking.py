"""Parking: a module and its optimizer leave memory, and come back as the same objects."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interrupting
import numpy as np
import pytest
import torch
from support import run_program, spin_until

import nvmeio
from nvmeio._storage import durable
from nvmeio.checkpoint import Checkpointer
from nvmeio.errors import ClosedError, IntegrityError, TransferError
from nvmeio.offload import Parked, SwappedModule, SwappedOptimizer, park, resume_parked
from nvmeio.offload._parking import memory
from nvmeio.testing import FakeEngine

WIDTH = 160  # 100 KiB a matrix: what is large leaves memory, the biases stay


class Net(torch.nn.Module):
    """Tied weights, a parameter that is a view, a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        first: Any = self.layers[0]
        self.tied.weight = first.weight
        self.base = torch.randn(3, WIDTH, WIDTH)
        self.view = torch.nn.Parameter(self.base[1])
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(x) @ self.view + self.table[0]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": [p], "lr": 1e-2 / (1 + n)} for n, p in enumerate(parameters)]
    ),
    "rprop": lambda parameters: torch.optim.Rprop(parameters),
}


def net() -> Any:
    return Net()


def loss_of(module: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return module(torch.randn(4, WIDTH, generator=generator)).square().mean()


def train(module: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(kind: str = "adamw", steps: int = 2) -> tuple[Any, Any]:
    module = net()
    optimizer = OPTIMIZERS[kind](module.parameters())
    train(module, optimizer, range(steps))
    return module, optimizer


def tensors_of(module: Any, optimizer: Any) -> list[torch.Tensor]:
    """All that are the user's, by what he has them from."""
    found = [*module.parameters(), *module.buffers()]
    found += [p.grad for p in module.parameters() if p.grad is not None]
    for parameter in module.parameters():
        found += [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_objects_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    module, optimizer = trained(kind)
    tensors = tensors_of(module, optimizer)
    wanted = [each.detach().clone() for each in tensors]
    versions = [each._version for each in tensors]
    places = [(each.data_ptr(), each.stride()) for each in tensors]
    with park(module, optimizer, swap_dir=tmp_path) as parked:
        large = [each for each in tensors if each.numel() == WIDTH * WIDTH]
        assert len(large) >= 10
        assert all(bool(each.isnan().all()) for each in large)
        assert parked.freed_bytes >= sum(each.nbytes for each in large)
        assert parked.nbytes >= parked.freed_bytes > 0.9 * parked.nbytes
    again = tensors_of(module, optimizer)
    assert all(mine is theirs for mine, theirs in zip(again, tensors, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, wanted, strict=True))
    assert [each._version for each in again] == versions
    assert [(each.data_ptr(), each.stride()) for each in again] == places
    assert list(tmp_path.iterdir()) == []
    same, theirs = trained(kind)
    assert train(module, optimizer, range(2, 5)) == train(same, theirs, range(2, 5))


def test_ties_views_and_whatever_else_shares_memory(tmp_path: Path) -> None:
    """numpy's views too; a storage is written once."""
    module, optimizer = trained()
    array = module.layers[1].weight.detach().numpy()
    kept = array.copy()
    alias = module.base[0]
    aliased = alias.clone()
    with park(module, swap_dir=tmp_path) as alone:
        assert not array[20:-20].any()  # its pages went
    assert (array == kept).all()
    assert torch.equal(alias, aliased)
    assert module.tied.weight is module.layers[0].weight
    module.base[1, 0, 0] = 5.0
    assert module.view[0, 0] == 5.0
    matrix = 4 * WIDTH * WIDTH
    gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    weights = 3 * (matrix + 4 * WIDTH) + 3 * matrix + matrix  # layers, `base`, `table`
    assert alone.nbytes == weights + gradients
    assert train(module, optimizer, range(1))


def test_a_small_module_is_guarded_and_let_go_too(tmp_path: Path) -> None:
    """Nothing of it leaves memory. It was refused for ever after."""
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        with park(module, optimizer, swap_dir=tmp_path) as parked:
            assert parked.freed_bytes == 0
            assert not parked.restored
            with pytest.raises(RuntimeError, match="it is parked"):
                module(torch.ones(3))
        assert parked.restored
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        assert list(tmp_path.iterdir()) == []
    park(module, optimizer, swap_dir=tmp_path).close()
    fresh = torch.nn.Linear(3, 3)
    resume_parked(fresh, torch.optim.SGD(fresh.parameters()), swap_dir=tmp_path)
    assert torch.equal(fresh.weight, module.weight)


def test_memory_is_given_back(tmp_path: Path) -> None:
    """What the process has, as the kernel counts it."""
    module = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    resident = resident_bytes()
    with park(module, optimizer, swap_dir=tmp_path) as parked:
        assert parked.freed_bytes > 350 << 20
        # Work that other tests have begun may still have memory.
        spin_until(lambda: resident - resident_bytes() > 0.9 * parked.freed_bytes)
    assert resident_bytes() > resident - (8 << 20)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_parked_refuses_to_be_used(tmp_path: Path) -> None:
    module, optimizer = trained()
    loss = loss_of(module, 9)
    uses: list[Callable[[], object]] = [
        lambda: loss_of(module, 0),
        lambda: module.layers[1](torch.ones(WIDTH)),
        module.state_dict,
        module.layers[0].state_dict,
        lambda: module.load_state_dict({}),
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
    ]
    with park(module, optimizer, swap_dir=tmp_path):
        for use in uses:
            with pytest.raises(RuntimeError, match=r"it is parked: .* Call restore\(\) of what"):
                use()
        for part in (module, module.layers):
            with pytest.raises(TypeError, match="restore"):
                copy.deepcopy(part)
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            module.view.add_(1)
    loss.backward()  # of a graph that is older
    assert module.state_dict().keys() == net().state_dict().keys()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not module._forward_pre_hooks
    assert not module.layers[0]._state_dict_pre_hooks


def test_kinds_come_back_one_by_one(tmp_path: Path) -> None:
    module, optimizer = trained()
    expected = loss_of(module, 3)
    parked = park(module, optimizer, swap_dir=tmp_path)
    parked.restore("parameters", "buffers")
    assert torch.equal(loss_of(module, 3), expected)  # to serve with new weights, say
    assert not parked.restored
    assert module.view.grad.isnan().all()
    with pytest.raises(RuntimeError, match="it is parked"):
        optimizer.step()
    parked.restore("gradients")
    assert not module.view.grad.isnan().any()
    with pytest.raises(ValueError, match=r"kinds must be one of 'parameters', .*not 'weights'"):
        parked.restore("weights")
    parked.restore()
    assert parked.restored
    assert parked.closed
    assert parked.restore_s > 0
    parked.restore()
    parked.close()
    same, theirs = trained()
    assert train(module, optimizer, range(2, 4)) == train(same, theirs, range(2, 4))


def test_what_is_back_is_the_callers_alone(tmp_path: Path) -> None:
    """Its Parked kept gradients, which `zero_grad` could not free."""
    module, optimizer = trained()
    with park(module, optimizer, swap_dir=tmp_path) as parked:
        parked.restore("gradients")
        gradients = [weakref.ref(p.grad.untyped_storage()) for p in module.parameters()]
        optimizer.zero_grad()
        assert not any(refer() for refer in gradients)
    kept = [weakref.ref(p) for p in module.parameters()]
    del module, optimizer
    gc.collect()
    assert not any(refer() for refer in kept)
    assert parked.restored


def test_reads_come_in_the_order_of_use(tmp_path: Path) -> None:
    places: list[int] = []
    engine = FakeEngine(fail=lambda kind, at, n: places.append(at) or 0 if kind == "pread" else 0)
    module, optimizer = trained()
    with nvmeio.AioHandle(engine=engine) as handle:
        park(module, optimizer, swap_dir=tmp_path, handle=handle).restore()
    assert len(places) > 10
    assert places == sorted(places)
    assert places[0] == 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_killed_process_leaves_the_state_to_the_next(kind: str, tmp_path: Path) -> None:
    killed = run_program(
        [sys.executable, __file__, kind, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    module = net()
    optimizer = OPTIMIZERS[kind](module.parameters())
    with pytest.raises(TransferError, match=r"resume_parked\(module, optimizer, swap_dir=…\) br"):
        park(module, optimizer, swap_dir=tmp_path)
    resume_parked(module, optimizer, swap_dir=tmp_path)
    same, theirs = trained(kind)
    for mine, wanted in zip(tensors_of(module, optimizer), tensors_of(same, theirs), strict=True):
        assert torch.equal(mine, wanted)
    assert train(module, optimizer, range(2, 5)) == train(same, theirs, range(2, 5))
    assert not (tmp_path / "parked").exists()
    with pytest.raises(FileNotFoundError, match="nothing is parked there"):
        resume_parked(module, optimizer, swap_dir=tmp_path)


def test_what_was_parked_goes_into_no_other_model(tmp_path: Path) -> None:
    module, optimizer = trained()
    park(module, optimizer, swap_dir=tmp_path).close()
    other = torch.nn.Linear(3, 3)
    changed = net()
    changed.view = torch.nn.Parameter(torch.zeros(3))
    cases = [
        (other, None, "it has view "),
        (changed, torch.optim.AdamW(changed.parameters()), "its view .of parameters. is torch.fl"),
        (net(), None, "its optimizer has 1 group of 7 parameters, and this one has 0 of 0"),
    ]
    for wrong, stepping, says in cases:
        with pytest.raises(IntegrityError, match=rf"belongs to another .*{says}"):
            resume_parked(wrong, stepping, swap_dir=tmp_path)
    fresh = net()
    resume_parked(fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-2), swap_dir=tmp_path)
    assert torch.equal(fresh.view, trained()[0].view)


# Second ones, others', wrong ones


def test_a_second_park_is_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    with pytest.raises(ValueError, match="the module is parked already, in "):
        park(module, optimizer, swap_dir=tmp_path / "other")
    with pytest.raises(ValueError, match=r"weight .* parked already \(call restore\(\)\)"):
        park(module.tied, swap_dir=tmp_path / "other")
    with pytest.raises(TransferError, match="swaps into this directory") as busy:
        park(*trained(), swap_dir=tmp_path)
    assert busy.value.errno == errno.EBUSY
    parked.close()
    assert not parked.restored
    with pytest.raises(ClosedError, match="make a new module and optimizer, and call"):
        parked.restore()
    with pytest.raises(TransferError) as left:
        park(*trained(), swap_dir=tmp_path)
    assert left.value.errno == errno.EEXIST
    with park(*trained(), swap_dir=tmp_path, overwrite=True) as parked:
        assert "on the drive" in repr(parked)
    assert "restored" in repr(parked)


def test_what_cannot_be_parked_is_named(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    module, optimizer = trained()
    shared = net()
    shared.view.share_memory_()
    on_meta = torch.nn.Linear(300, 300, device="meta")
    sparse = torch.nn.Embedding(300, 300, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with SwappedModule(net(), swap_dir=tmp_path / "swap", resident_bytes="1MB") as swapped:
        cases: list[tuple[Any, Any, type[Exception], str]] = [
            (shared, None, ValueError, "view .of parameters. is in memory that is shared"),
            (on_meta, None, ValueError, "weight .of parameters. is on the meta device"),
            (sparse, None, TypeError, "weight .of gradients. is a sparse_coo tensor"),
            (swapped, None, TypeError, "SwappedModule is on the drive already"),
            (swapped.module, None, ValueError, "is swapped by a SwappedModule"),
            (3, None, TypeError, "module must be a torch.nn.Module, not int"),
            (module, 3, TypeError, "optimizer must be a torch optimizer, not int"),
        ]
        for what, stepping, kind, says in cases:
            with pytest.raises(kind, match=says):
                park(what, stepping, swap_dir=tmp_path)
    ours = SwappedOptimizer(torch.optim.SGD, module.parameters(), swap_dir=tmp_path)
    with ours, pytest.raises(TypeError, match="SwappedOptimizer is on the drive already"):
        park(module, ours, swap_dir=tmp_path)
    with pytest.raises(FileNotFoundError):
        park(module, optimizer, swap_dir=tmp_path / "not" / "there")
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_a_parameter_that_was_converted_meanwhile(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    module.view.data = module.view.data.double()
    with pytest.raises(RuntimeError, match=r"view .of parameters. was torch.float32 on cpu"):
        parked.restore()
    assert module.table.isnan().all()
    module.view.data = module.view.data.float()
    parked.restore()
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_other_values_that_were_given_meanwhile_are_not_lost(tmp_path: Path) -> None:
    """`restore` replaced them without a word."""
    module, optimizer = trained()
    counts = torch.arange(WIDTH * WIDTH)
    module.register_buffer("counts", counts.clone())
    parked = park(module, optimizer, swap_dir=tmp_path)
    given = torch.full((WIDTH, WIDTH), 7.0)
    module.view.data = given
    module.counts.data = counts + 1
    for name, empty in (("view", torch.nan), ("counts", 0)):
        with pytest.raises(RuntimeError, match=rf"^{name} .* was given other values while it was"):
            parked.restore()
        tensor = getattr(module, name)
        tensor.data = torch.full_like(tensor, empty)
    parked.restore()
    assert torch.equal(module.counts, counts)
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_a_parked_module_is_not_converted(tmp_path: Path) -> None:
    """Buffers became other tensors, of NaN, and stayed so after `restore`."""
    module, optimizer = trained()
    uses: list[Callable[[], object]] = [
        module.double,
        module.half().float,
        lambda: module.layers[0].to(torch.bfloat16),
        lambda: torch.nn.Sequential(module).to("meta"),
    ]
    table = module.table
    with park(module, optimizer, swap_dir=tmp_path):
        for use in uses:
            with pytest.raises(RuntimeError, match="it is parked"):
                use()
    assert module.table is table
    assert not table.isnan().any()
    assert module.double().table.dtype is torch.float64


def test_backward_of_an_older_call_is_refused(tmp_path: Path) -> None:
    """It read zeros for the weights that autograd had saved: wrong gradients, without a word."""
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    x = torch.randn(3, WIDTH)
    loss, again = module(x).square().sum(), module(x).square().sum()
    with park(module, swap_dir=tmp_path) as parked:
        with pytest.raises(RuntimeError, match="it is parked"):
            loss.backward()
        assert all(p.grad is None for p in module.parameters())
        parked.restore("parameters")
        again.backward()
    assert all(p._backward_hooks is None for p in module.parameters())
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, module.parameters(), strict=True))


def test_an_older_save_is_not_spoilt(tmp_path: Path) -> None:
    """Its bytes are read beside the program, where zeros would be; it failed, or kept those."""
    (tmp_path / "saves").mkdir()
    (tmp_path / "swap").mkdir()
    blocking = threading.Event()

    def wait(*_: object) -> int:
        blocking.wait(60)
        return 0

    module = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(module.parameters())

    async def save_and_park() -> None:
        with nvmeio.AioHandle(engine=FakeEngine(fail=wait)) as handle:
            async with Checkpointer(tmp_path / "saves", handle=handle) as saves:
                try:
                    report = await saves.save(module.state_dict(), 1)
                    with pytest.raises(ValueError, match=r"weight .* is in use by .*save"):
                        park(module, optimizer, swap_dir=tmp_path / "swap")
                finally:
                    blocking.set()
                await saves.wait()
                with park(module, optimizer, swap_dir=tmp_path / "swap"):
                    pass
        assert torch.equal(nvmeio.load(report.path)["weight"], module.weight)

    asyncio.run(save_and_park())
    assert list((tmp_path / "swap").iterdir()) == []


def test_memory_that_is_shared_or_read_only_is_refused(tmp_path: Path) -> None:
    """It could not be filled again, or what another process wrote there was lost."""
    values = np.random.default_rng(0).random((WIDTH, WIDTH), dtype=np.float32)
    file = tmp_path / "values"
    values.tofile(file)
    for mode in ("c", "r+", "r"):
        array = np.memmap(file, np.float32, mode, shape=values.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is not writable
            module = torch.nn.ParameterList([torch.from_numpy(array)])
        if mode == "c":
            park(module, swap_dir=tmp_path).restore()
        else:
            with pytest.raises(
                ValueError, match=r"0 .of parameters. is in memory that is read-onl"
            ):
                park(module, swap_dir=tmp_path)
        assert (module[0].detach().numpy() == values).all()


def test_a_tensor_that_repeats_one_value_is_not_taken_for_a_parked_one(tmp_path: Path) -> None:
    module, _ = trained()
    module.register_buffer("ones", torch.ones(()).expand(WIDTH))
    with park(module, swap_dir=tmp_path):
        pass
    assert module.ones.sum() == WIDTH


def test_a_script_module_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    """Its hooks were refused once all was written, and it counted as parked from then on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        module = torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(200, 200), torch.ones(200)))
    with pytest.raises(TypeError, match="0 is a ScriptModule"):
        park(module, swap_dir=tmp_path)
    assert Parked.of(module) is None
    assert not module(torch.ones(200)).isnan().any()


def test_a_tensor_that_refuses_to_leave_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its storage stayed without values."""
    module, optimizer = trained()
    put = memory._lay
    laid: list[torch.Tensor] = []

    def refuse(tensor: torch.Tensor, other: torch.Tensor) -> None:
        laid.append(tensor)
        if len(laid) == 6:
            raise ZeroDivisionError
        put(tensor, other)

    module.table.set_(module.base.untyped_storage(), 0, (WIDTH, WIDTH))  # with `view`
    wanted = [each.detach().clone() for each in tensors_of(module, optimizer)]
    for _ in range(20):
        laid.clear()
        monkeypatch.setattr(memory, "_lay", refuse)
        with pytest.raises(ZeroDivisionError):
            park(module, optimizer, swap_dir=tmp_path)
        monkeypatch.setattr(memory, "_lay", put)
        check_after_interrupt(module, optimizer, wanted, tmp_path)


def test_tensors_without_elements_come_back_in_a_new_process(tmp_path: Path) -> None:
    """Such as shards that a rank has nothing of. They were looked for, and not found."""

    def with_empty() -> torch.nn.Module:
        module = net()
        module.register_buffer("empty", torch.empty(0))
        module.nothing = torch.nn.Parameter(torch.empty(0, 5))
        return module

    module = with_empty()
    park(module, swap_dir=tmp_path).close()
    fresh = with_empty()
    torch.nn.init.zeros_(fresh.view)
    resume_parked(fresh, swap_dir=tmp_path)
    assert torch.equal(fresh.view, net().view)


def test_a_handle_that_was_closed_meanwhile(tmp_path: Path) -> None:
    """Nothing could bring the module back then: `restore` takes no other one."""
    module, optimizer = trained()
    with nvmeio.AioHandle() as handle:
        parked = park(module, optimizer, swap_dir=tmp_path, handle=handle)
    parked.restore()
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_what_a_new_process_would_misread_is_refused_or_kept(tmp_path: Path) -> None:
    """numpy's numbers made the manifest unreadable; another order gave parameters others' state."""
    module, optimizer = trained("sgd")
    optimizer.state[module.view]["scale"] = np.float64(2.5)
    park(module, optimizer, swap_dir=tmp_path).close()
    fresh = net()
    turned = OPTIMIZERS["sgd"](list(fresh.parameters())[::-1])
    with pytest.raises(IntegrityError, match=r"parameter 0 of its optimizer is view, and this one"):
        resume_parked(fresh, turned, swap_dir=tmp_path)
    stepping = OPTIMIZERS["sgd"](fresh.parameters())
    resume_parked(fresh, stepping, swap_dir=tmp_path)
    assert stepping.state[fresh.view]["scale"] == 2.5


def test_names_are_durable_before_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the manifest was not: after a loss of power nothing might have been found."""
    synced: list[set[str]] = []
    sync = durable.sync_directory

    def noting(path: str) -> None:
        synced.append(set(os.listdir(path)))
        sync(path)

    monkeypatch.setattr(durable, "sync_directory", noting)
    with park(*trained(), swap_dir=tmp_path):
        assert any({"manifest.0", "parked"} <= names for names in synced)


def test_in_a_thread_with_a_default_device(tmp_path: Path) -> None:
    """The work is done in place there, and what it made was on that device."""
    module, optimizer = trained()
    fresh = net()
    stepping = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.device("meta"):
                park(module, optimizer, swap_dir=tmp_path).restore()
                park(module, optimizer, swap_dir=tmp_path).close()
                resume_parked(fresh, stepping, swap_dir=tmp_path)
        except BaseException as failed:
            failures.append(failed)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not failures
    assert train(fresh, stepping, range(2, 4)) == train(*trained(), range(2, 4))


def test_one_that_is_dropped_says_so(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    assert Parked.of(module) is parked
    del parked
    gc.collect()
    found = Parked.of(module)  # the module keeps it
    assert found is not None
    found.restore()
    assert Parked.of(module) is None
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))
    park(module, optimizer, swap_dir=tmp_path)
    del found
    with pytest.warns(ResourceWarning, match="a Parked was dropped: its state is in"):
        del module, optimizer
        gc.collect()
    fresh = net()
    resume_parked(fresh, torch.optim.AdamW(fresh.parameters()), swap_dir=tmp_path)


def test_a_forked_child_does_not_restore(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            parked.restore()
        except ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    parked.restore()
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_two_threads_restore_once(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    threads = [threading.Thread(target=parked.restore) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert train(module, optimizer, range(2, 3)) == train(*trained(), range(2, 3))


def test_over_several_drives(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    module, optimizer = trained()
    with park(module, optimizer, swap_dir=drives):
        assert all((drive / "parked" / "parked").stat().st_size for drive in drives)
    park(module, optimizer, swap_dir=drives).close()
    fresh = net()
    stepping = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(IntegrityError, match="b/parked is missing"):
        resume_parked(fresh, stepping, swap_dir=drives[0])
    resume_parked(fresh, stepping, swap_dir=drives[::-1])
    assert train(fresh, stepping, range(2, 4)) == train(*trained(), range(2, 4))


# Failures


@pytest.fixture
def faulty() -> Iterator[tuple[nvmeio.AioHandle, dict[str, Any]]]:
    """A handle, and what fails of it: the kind, and from which offset on."""
    failing: dict[str, Any] = {}

    def fail(kind: str, file_offset: int, nbytes: int) -> int:
        number, start = failing.get(kind, (0, 0))
        return number if file_offset >= start else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        yield handle, failing


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_park_that_fails_has_not_happened(number: int, faulty: Any, tmp_path: Path) -> None:
    handle, failing = faulty
    module, optimizer = trained()
    failing["pwrite"] = (number, 500_000)
    with pytest.raises(TransferError, match="for the parked ") as failed:
        park(module, optimizer, swap_dir=tmp_path, handle=handle)
    assert failed.value.errno == number
    assert list(tmp_path.iterdir()) == []
    failing.clear()
    with park(module, optimizer, swap_dir=tmp_path, handle=handle):
        pass
    assert train(module, optimizer, range(2, 4)) == train(*trained(), range(2, 4))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int, path: str) -> None:
        raise TransferError(errno.ENOSPC, operation="allocate", path=path, nbytes=nbytes)

    monkeypatch.setattr("nvmeio._storage.durable.reserve", refuse)
    module, optimizer = trained()
    with pytest.raises(TransferError) as full:
        park(module, optimizer, swap_dir=tmp_path)
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert train(module, optimizer, range(2, 4)) == train(*trained(), range(2, 4))


def test_a_restore_that_fails_is_made_again(faulty: Any, tmp_path: Path) -> None:
    """What was read stays, the rest is parked as before."""
    handle, failing = faulty
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path, handle=handle)
    failing["pread"] = (errno.EIO, 500_000)
    for _ in range(2):
        with pytest.raises(TransferError, match="for the parked "):
            parked.restore()
        assert not parked.restored
        assert not module.layers[0].weight.isnan().any()
        states = [optimizer.state[p]["exp_avg"] for p in module.parameters() if p.dim() == 2]
        assert all(bool(each.isnan().all()) for each in states)
        with pytest.raises(RuntimeError, match="it is parked"):
            optimizer.step()
    failing.clear()
    parked.restore()
    assert train(module, optimizer, range(2, 4)) == train(*trained(), range(2, 4))


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    parked = park(module, optimizer, swap_dir=tmp_path)
    file = tmp_path / "parked" / "parked"
    whole = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(250_000)
        opened.write(bytes([whole[250_000] ^ 1]))
    with pytest.raises(IntegrityError, match=r"is not what was written: .*go on from a checkpoint"):
        parked.restore()
    assert not parked.restored
    file.write_bytes(whole)
    parked.restore()
    assert train(module, optimizer, range(2, 4)) == train(*trained(), range(2, 4))


def test_a_block_that_raises_restores(tmp_path: Path) -> None:
    module, optimizer = trained()
    with pytest.raises(ZeroDivisionError), park(module, optimizer, swap_dir=tmp_path):
        _ = 1 / 0
    assert train(module, optimizer, range(2, 4)) == train(*trained(), range(2, 4))


# Interrupts


def check_after_interrupt(module: Any, optimizer: Any, wanted: Any, folder: Path) -> None:
    """Whatever was cut short has not happened, or is known to the module."""
    found = Parked.of(module)
    if found is not None:
        found.restore()
    assert Parked.of(module) is None
    tensors = tensors_of(module, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
    assert list(folder.iterdir()) == []


def test_interrupts_everywhere(tmp_path: Path) -> None:
    interrupting.skip_without_opcodes()
    module, optimizer = trained()
    wanted = [each.detach().clone() for each in tensors_of(module, optimizer)]
    count = 0

    def work() -> None:
        park(module, optimizer, swap_dir=tmp_path).restore()

    for _ in interrupting.at_places(work, 60):
        count += 1
        check_after_interrupt(module, optimizer, wanted, tmp_path)
    assert count > 20


def test_interrupts_at_any_time(tmp_path: Path) -> None:
    module, optimizer = trained()
    wanted = [each.detach().clone() for each in tensors_of(module, optimizer)]

    def work() -> None:
        park(module, optimizer, swap_dir=tmp_path).restore()

    for _ in interrupting.at_random_times(work, 40):
        check_after_interrupt(module, optimizer, wanted, tmp_path)


def killed_while_parked(kind: str, folder: str) -> None:
    module, optimizer = trained(kind)
    warnings.simplefilter("error")
    _parked = park(module, optimizer, swap_dir=folder)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    killed_while_parked(*sys.argv[1:])
