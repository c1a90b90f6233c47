"""Every kind of model, at several sizes, in a process that may not take as much memory.

The limit is on what the process adds after its imports. The tokens and logits are compared with
those of the model loaded whole by transformers, here, where there is no limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import MODELS, loaded, logits, prompt, saved, sized, tokens

import nvmeio

MIB = 1 << 20
_SCRIPT = Path(__file__).parent / "_under_limit.py"


Under = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def under_limit() -> Iterator[Under]:
    """Has a job done in a process that has a limit."""
    paths = [Path(nvmeio.__file__).parent.parent, _SCRIPT.parent.parent]
    server = subprocess.Popen(
        [sys.executable, str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "MALLOC_ARENA_MAX": "1",  # each further one reserves 64 MiB of addresses
            "MALLOC_MMAP_THRESHOLD_": "131072",  # what is freed is given back
            "MALLOC_TRIM_THRESHOLD_": "131072",
        },
    )
    assert server.stdin is not None and server.stdout is not None

    def do(job: dict[str, Any]) -> dict[str, Any]:
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, "the process with the limit ended"
        found: dict[str, Any] = json.loads(line)
        assert "error" not in found, found["error"]
        return found

    try:
        assert json.loads(server.stdout.readline()) == {"ready": True}
        yield do
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def compare(
    name: str, times: float, limit: int, width: int, count: int, folder: Path, under: Under
) -> None:
    directory = folder / "model"
    saved(lambda: sized(name, int(times * limit), width), directory)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert weights >= times * limit
    out = folder / "found.pt"
    budget = limit * 3 // 8  # the rest is for activations, stacks and the ring of bounce blocks
    told = under(
        {
            "directory": str(directory),
            "limit": limit,
            "resident_bytes": budget,
            "tokens": count,
            "out": str(out),
        }
    )
    found = torch.load(out)
    whole = loaded(directory)
    ids = prompt()
    assert found["logits"].equal(logits(whole, ids))
    assert found["tokens"].equal(tokens(whole, ids, count))
    assert found["tokens"].shape[-1] >= count
    # Most of it was read anew for every token.
    assert told["streamed_bytes"] > weights - budget - limit // 4
    assert told["resident_bytes"] + told["window_bytes"] + told["work_bytes"] <= budget


@pytest.mark.parametrize("times", [1.0, 4.1])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_larger_than_memory_computes_the_same(
    name: str, times: float, tmp_path: Path, under_limit: Under
) -> None:
    """Of more than four times the limit: no way of loading it would do."""
    compare(name, times, 64 * MIB, 384, 3, tmp_path, under_limit)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [1.0, 2.0, 4.1])
@pytest.mark.parametrize("name", MODELS)
def test_a_much_larger_model_computes_the_same(
    name: str, times: float, tmp_path: Path, under_limit: Under
) -> None:
    compare(name, times, 256 * MIB, 1024, 8, tmp_path, under_limit)
