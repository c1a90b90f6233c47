"""Models whose matrices are cut by transformers' plan, streamed: real processes with gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint._ranks import running_ranks
from hypothesis import given
from hypothesis import strategies as st
from inference import _models as models

from nvmeio.inference import pack
from nvmeio.inference._parallel import tensor_parallel
from nvmeio.inference._plan.slot_layout import FileExtent, WeightPart

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_columns_of_a_matrix_in_pieces(rows: int, width: int, data: st.DataObject) -> None:
    """They are what torch cuts, from however many places of files."""
    nbytes = rows * width * 2
    cuts = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=3))})
    files = [bytearray(1000), bytearray(1000)]
    matrix = torch.randint(-1000, 1000, (rows, width), dtype=torch.int16)
    stored = matrix.numpy().tobytes()
    extents = []
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        offset = 11 + 300 * (number // 2)
        extents.append(FileExtent(number % 2, offset, end - start, start))
        files[number % 2][offset : offset + end - start] = stored[start:end]
    first = data.draw(st.integers(0, width))
    last = data.draw(st.integers(first, width))
    part = tensor_parallel.columns(
        WeightPart(torch.int16, (rows, width), tuple(extents)), first, last
    )
    got = bytearray(part.nbytes)
    for file, offset, length, at in part.extents:
        got[at : at + length] = files[file][offset : offset + length]
    assert got == matrix[:, first:last].contiguous().numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tp")
    # Halves are further apart than what is read over as a hole.
    large: dict[str, int] = {"layers": 3, "width": 512, "num_key_value_heads": 4}
    models.saved(lambda: models.llama(**large), made / "llama")
    models.saved(lambda: models.qwen3(**large), made / "qwen3")
    models.saved(lambda: models.llama(tie_word_embeddings=True), made / "tied")
    models.saved(models.mixtral, made / "mixtral")
    pack(made / "llama", made / "four bits", quant_bits=4)
    models.saved(lambda: models.llama(width=192, layers=2), made / "odd")
    pack(made / "odd", made / "packed", quant_bits=8)
    return made


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., None]]:
    script = str(Path(__file__).parent / "_tp_rank.py")
    with running_ranks(script) as run:
        yield lambda work, *where, world=2, **options: run(world, f"tp_{work}", *where, **options)


@pytest.mark.parametrize("world", [2, 4])
def test_logits_of_transformers_and_the_bytes_of_a_rank(
    world: int, ranks: Callable[..., None], folder: Path
) -> None:
    ranks("equal", folder, world=world)


def test_a_rank_fails(ranks: Callable[..., None], folder: Path) -> None:
    ranks("fails", folder)


def test_a_rank_dies(ranks: Callable[..., None], folder: Path) -> None:
    ranks("killed", folder, victim=1)
