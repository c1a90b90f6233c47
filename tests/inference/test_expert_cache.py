"""The cache of experts: what is kept, what is read, and what is left after a failure."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference._model_budget import Make, least, weights_of
from inference._models import loaded, logits, mixtral, prompt, saved, tokens
from support import thread
from torch import nn

import nvmeio
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.inference import pack
from nvmeio.inference._experts import places as places_module
from nvmeio.inference._experts.arrivals import Arrival
from nvmeio.inference._experts.expectation import expected_hits
from nvmeio.inference._experts.recency import Recency
from nvmeio.inference._experts.waiting import Arriving, ArrivingWeight
from nvmeio.inference._model_plan import _needs_of
from nvmeio.inference._plan.budget import ExpertNeeds
from nvmeio.inference._stream.stand_ins import Shown
from nvmeio.testing import FakeEngine


def many_experts() -> Any:
    """Four layers of 16 experts, two a token."""
    return mixtral(experts=16)


def bytes_of_experts(model: Any) -> int:
    return sum(p.nbytes for layer in model.model.layers for p in layer.mlp.experts.parameters())


def with_share(stream: Make, directory: Path, share: float, **options: Any) -> Any:
    """A stream whose budget holds a share of the experts, and all else."""
    whole = loaded(directory)
    experts = bytes_of_experts(whole)
    others = weights_of(whole) - experts
    return stream(
        directory, resident_bytes=int(others * 1.5) + int(experts * share) + (256 << 10), **options
    )


# What is kept


def test_a_token_that_asks_for_the_same_experts_again_reads_nothing(
    tmp_path: Path, stream: Make
) -> None:
    """Experts were forgotten after each token, and whole layers kept in their stead."""
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.5)
    one = prompt(batch=1, length=1)
    logits(model, one)
    before = model.weight_stream.stats
    for _ in range(5):
        assert logits(model, one).equal(logits(loaded(tmp_path), one))
    after = model.weight_stream.stats
    assert after.bytes_read == before.bytes_read
    assert after.experts.misses == before.experts.misses == 2 * 4
    assert after.experts.hits - before.experts.hits == 5 * 2 * 4


@pytest.mark.parametrize("share", [0.26, 0.5, 1.1])
def test_tokens_are_those_of_the_model_in_memory(
    tmp_path: Path, stream: Make, share: float
) -> None:
    """At the smallest of these an expert goes in nearly every layer of every token."""
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, share)
    ids = prompt(batch=2, length=6)
    assert tokens(model, ids, 60).equal(tokens(loaded(tmp_path), ids, 60))
    counted = model.weight_stream.stats.experts
    assert bool(counted.evictions) == (share < 1)
    assert counted == tuple(map(sum, zip(*model.weight_stream.expert_stats, strict=True)))


def test_a_prompt_leaves_what_decoding_asks_for(tmp_path: Path, stream: Make) -> None:
    """It touches every expert, and would push all others out."""
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.5)
    one = prompt(batch=1, length=1)
    for _ in range(2):
        logits(model, one)
    logits(model, prompt(batch=8, length=40))
    before = model.weight_stream.stats.experts.misses
    logits(model, one)
    assert model.weight_stream.stats.experts.misses - before <= 4  # of 8


def test_no_more_memory_is_used_than_was_given(tmp_path: Path, stream: Make) -> None:
    """Pages of experts are counted by the kernel, after every expert was in memory once."""
    saved(lambda: mixtral(experts=16, width=128, intermediate_size=1024), tmp_path)
    model = with_share(stream, tmp_path, 0.3)
    stats = model.weight_stream.stats
    spaces = [(p.address, p.experts.all_nbytes) for p in model.weight_stream._cache._places]
    for length in (40, 1, 2, 1, 40):
        logits(model, prompt(batch=2, length=length))
        kept = resident_bytes(spaces)
        assert stats.expert_bytes // 2 < kept <= stats.expert_bytes


def resident_bytes(spaces: Sequence[tuple[int, int]]) -> int:
    """Memory in some address spaces, which the kernel may have joined with each other.

    Source: man 5 proc, /proc/pid/smaps.
    """

    def covers(address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in spaces)

    total, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii") as maps:
        for line in maps:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                inside = covers(start) and covers(end - 1)
            elif inside and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


# Packed and converted experts


@pytest.mark.parametrize("compute", ["auto", "packed", "widened"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_experts_are_kept(tmp_path: Path, stream: Make, bits: int, compute: Any) -> None:
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=bits)
    ids = prompt(batch=1, length=3)
    everything = stream(tmp_path / "packed", compute=compute)
    few = stream(
        tmp_path / "packed",
        compute=compute,
        resident_bytes=least(stream, tmp_path / "packed", compute=compute),
    )
    assert tokens(few, ids, 30).equal(tokens(everything, ids, 30))
    assert few.weight_stream.stats.experts.evictions > 8


def test_experts_are_converted_as_they_come(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path)
    whole = loaded(tmp_path, dtype=torch.bfloat16)
    budget = least(stream, tmp_path, dtype="bfloat16")
    model = stream(tmp_path, dtype="bfloat16", resident_bytes=budget)
    ids = prompt(batch=1, length=3)
    assert tokens(model, ids, 30).equal(tokens(whole, ids, 30))
    assert model.weight_stream.stats.experts.evictions > 8


def test_reads_of_converted_experts_are_begun_by_the_owner(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that computes began them: an interrupt could lose one that went on writing."""
    saved(many_experts, tmp_path)
    model = stream(tmp_path, dtype="bfloat16")
    threads: set[threading.Thread] = set()
    begin = Arrival.begin

    def noting(arrival: Arrival) -> None:
        threads.add(threading.current_thread())
        begin(arrival)

    monkeypatch.setattr(Arrival, "begin", noting)
    logits(model, prompt(batch=1, length=3))
    assert threads
    assert threading.main_thread() not in threads


# Kernels that look at experts on their way


class _OnItsWay:
    """The arrival of one expert, whose bytes come when it is waited for."""

    begun = True
    right = False

    def __init__(self, expert: torch.Tensor) -> None:
        self._expert = expert

    def done(self) -> bool:
        return self.right

    def wait(self) -> None:
        self._expert.fill_(1.0)
        self.right = True


@pytest.mark.parametrize("view", ["mT", "mH", "data", "real"])
def test_a_view_of_experts_on_their_way_waits_for_them(view: str) -> None:
    """`weight.mT` was a plain tensor at once: its products were those of unread memory."""
    experts = torch.zeros(3, 4, 4)
    on_their_way: Any = {number: _OnItsWay(experts[number]) for number in range(3)}
    arriving = Arriving(on_their_way, OwnerThread("unused"))
    shown = Shown(experts, requires_grad=False)
    weight = ArrivingWeight.over(shown, arriving)
    assert weight.shape == (3, 4, 4)
    assert not any(arrival.right for arrival in on_their_way.values())
    assert torch.equal(getattr(weight, view)[1] @ torch.ones(4), torch.full((4,), 4.0))


# Experts that are modules of their own


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.silu(self.up(x)))
        return result


class ListMixture(nn.Module):
    """As mixtures were written before transformers fused them: a loop over modules."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(Gated(width) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            if len(tokens):
                out.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return x + out


class ListModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ListMixture(64, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_experts_in_a_list_are_kept_one_by_one(tmp_path: Path, stream: Make, dtype: Any) -> None:
    """Each is a module: a whole layer was read for two of its twelve experts."""
    torch.manual_seed(0)
    whole = ListModel().eval()
    path = tmp_path / "model.safetensors"
    nvmeio.save_safetensors(whole.state_dict(), path)
    whole = whole.to(torch.bfloat16 if dtype else torch.float32)
    with torch.device("meta"):
        empty = ListModel().eval()
    model = stream(empty, path, resident_bytes=1_400_000, dtype=dtype)
    assert len(model.weight_stream.experts) == 4
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1 + seed % 3 * 20, 64, generator=generator).to(next(whole.parameters()))
        with torch.no_grad():
            assert model(x).equal(whole(x))
    counted = model.weight_stream.stats.experts
    assert counted.evictions and counted.hits
    weight = model.layers[1].experts[3].up.weight
    assert weight.is_meta
    assert (weight + 0).equal(whole.layers[1].experts[3].up.weight)


# Failures


def test_an_unreadable_expert_fails_its_pass_with_its_name(tmp_path: Path, stream: Make) -> None:
    """And leaves the model usable, once it can be read."""
    saved(many_experts, tmp_path)
    broken = threading.Event()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if broken.is_set() else 0

    ids = prompt(batch=1, length=2)
    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        model = with_share(stream, tmp_path, 0.3, handle=handle)
        expected = logits(loaded(tmp_path), ids)
        assert logits(model, ids).equal(expected)
        broken.set()
        with pytest.raises(TransferError, match=r"expert \d+ of model\.layers\.\d\.mlp\.experts"):
            for seed in range(20):
                torch.manual_seed(seed)
                logits(model, torch.randint(3, 100, (1, 3)))
        broken.clear()
        assert logits(model, ids).equal(expected)
        model.weight_stream.close()


def test_a_corrupt_expert_is_never_computed_with(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", keep_fused=True)
    path = tmp_path / "packed" / "model.safetensors"
    with nvmeio.safe_open(path) as opened:
        names = [name for name in opened.keys() if "experts.down_proj" in name]  # noqa: SIM118
    from nvmeio._formats.safetensors.open_set import header_of

    with nvmeio.open(path) as file:
        entry = header_of(file).tensors[names[-1]]
    with path.open("r+b") as file_:
        share = (entry.end - entry.start) // 16
        for expert in range(16):
            file_.seek(entry.start + expert * share + 64)
            file_.write(b"\xa5" * 8)
    model = with_share(stream, tmp_path / "packed", 0.5)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"expert \d+ of model\.layers\.3\.mlp\.experts"):
            logits(model, prompt(batch=1, length=2))
    model.weight_stream.close()


def test_what_a_hook_keeps_of_an_expert_stays_as_it_was(tmp_path: Path, stream: Make) -> None:
    """Its pages went to another expert, under the hook's tensor."""
    saved(many_experts, tmp_path)
    whole = loaded(tmp_path)
    model = with_share(stream, tmp_path, 0.26)
    experts = model.model.layers[1].mlp.experts
    kept: dict[int, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        routed = [e for e in range(16) if bool(experts.down_proj[e].ne(0).any())]
        kept.update((e, experts.down_proj.detach()[e]) for e in routed[:1])

    hook = experts.act_fn.register_forward_hook(keep)
    logits(model, prompt(batch=1, length=1))
    hook.remove()
    (number,) = kept
    for seed in range(10):
        torch.manual_seed(seed)
        ids = torch.randint(3, 100, (1, 8))
        assert logits(model, ids).equal(logits(whole, ids))
    assert torch.equal(kept[number], whole.model.layers[1].mlp.experts.down_proj[number])


@pytest.mark.parametrize("share", [0.26, 0.6])
def test_what_a_hook_keeps_stays_without_more_address_space(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """There was no other place for its set: the pages under the tensor went to other experts."""
    saved(many_experts, tmp_path)
    model, whole = with_share(stream, tmp_path, share), loaded(tmp_path)

    def refuse(places: places_module.Places, experts: Any) -> None:
        raise MemoryError("no address space")

    monkeypatch.setattr(places_module.Places, "__init__", refuse)
    kept: list[torch.Tensor] = []
    experts = model.model.layers[1].mlp.experts

    def keep(*_: Any) -> None:
        routed = [e for e in range(16) if bool(experts.down_proj[e].ne(0).any())]
        kept.append(experts.down_proj.detach()[routed[0]])

    hook = experts.act_fn.register_forward_hook(keep)
    logits(model, prompt(batch=1, length=1))
    hook.remove()
    del kept[1:]
    expected = kept[0].clone()
    refused = 0
    for token in range(3, 60):
        ids = torch.tensor([[token]])
        try:
            assert logits(model, ids).equal(logits(whole, ids))
        except MemoryError as no_room:
            assert "keeps tensors over weights of model.layers.1.mlp.experts" in str(no_room)
            refused += 1
        assert kept[0].equal(expected)
    assert not refused or share < 0.5
    kept.clear()
    ids = prompt(batch=1, length=6)
    assert tokens(model, ids, 30).equal(tokens(whole, ids, 30))


def test_several_threads_get_the_tokens_of_the_model_in_memory(
    tmp_path: Path, stream: Make
) -> None:
    saved(many_experts, tmp_path)
    model, whole = with_share(stream, tmp_path, 0.4), loaded(tmp_path)
    prompts = [prompt(batch=1, length=length) for length in (2, 5, 9)]
    expected = [tokens(whole, ids, 15) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        found[number] = tokens(model, prompts[number], 15)

    with thread(lambda: run(0)), thread(lambda: run(1)):
        run(2)
    assert all(found[number].equal(expected[number]) for number in range(3))


def test_a_stream_that_was_opened_again_begins_without_experts(
    tmp_path: Path, stream: Make
) -> None:
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.4)
    one = prompt(batch=1, length=1)
    logits(model, one)
    before = model.weight_stream.stats.experts
    model.weight_stream.close()
    assert model.weight_stream.stats.experts == before
    model.weight_stream.reopen()
    assert logits(model, one).equal(logits(loaded(tmp_path), one))
    assert model.weight_stream.stats.experts.misses == 2 * before.misses


def test_a_kernel_that_moves_no_pages_has_them_given_back(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.7, and where a process has vm.max_map_count mappings."""
    monkeypatch.setattr(places_module.Places, "take_pages", lambda *_: False)
    saved(many_experts, tmp_path)
    model = with_share(stream, tmp_path, 0.26)
    ids = prompt(batch=1, length=6)
    assert tokens(model, ids, 30).equal(tokens(loaded(tmp_path), ids, 30))
    spaces = [(p.address, p.experts.all_nbytes) for p in model.weight_stream._cache._places]
    assert 0 < resident_bytes(spaces) <= model.weight_stream.stats.expert_bytes


# The order


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_the_order_is_that_of_the_last_use_behind_what_passes(
    steps: list[tuple[bool, int]],
) -> None:
    recency: Recency[int] = Recency()
    used: list[int] = []
    passing: list[int] = []
    for is_use, key in steps:
        if is_use:
            recency.use(key)
            used = [k for k in used if k != key] + [key]
            passing = [k for k in passing if k != key]
        else:
            recency.pass_by(key)
            if key not in used and key not in passing:
                passing.append(key)
    assert list(recency.victims(())) == passing + used
    assert list(recency.victims({3, 4})) == [k for k in passing + used if k not in (3, 4)]
    assert list(recency.victims((), passing_only=True)) == passing
    assert recency.used == len(used)


def test_the_least_memory_holds_the_largest_set_beside_the_largest_conversion() -> None:
    """A large set that is read as it is had less, beside a small one that is converted."""
    unit = SimpleNamespace(widened_bytes=0)
    as_it_is = SimpleNamespace(all_nbytes=100, least_nbytes=100, unit=unit)
    converted = SimpleNamespace(all_nbytes=60, least_nbytes=110, unit=unit)
    sets: Any = [as_it_is, converted]
    assert _needs_of(sets) == ExpertNeeds(least=150, most=210)


def test_the_log_says_how_many_experts_fit(
    tmp_path: Path, stream: Make, caplog: pytest.LogCaptureFixture
) -> None:
    saved(many_experts, tmp_path)
    with caplog.at_level("DEBUG", logger="nvmeio"):
        model = with_share(stream, tmp_path, 0.5)
    share = model.weight_stream.stats.expert_bytes / bytes_of_experts(loaded(tmp_path))
    assert f"{int(64 * share)} of 64 experts fit" in caplog.text


def test_the_expected_hits_are_those_of_the_published_traces() -> None:
    assert [expected_hits(kept / 128) for kept in (0, 8, 16, 32, 64, 128)] == [
        *(0.0, 0.424, 0.647, 0.81, 0.918),
        1.0,
    ]
    between = [expected_hits(share / 100) for share in range(101)]
    assert between == sorted(between)
