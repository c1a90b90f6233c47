"""`benchmarks/gpu_check.py` as on a machine with a GPU and cuFile: on the stand-in, in tests.

    python tests/device/gpu_on_stand_in.py LIBRARY SCRATCH [what gpu_check.py takes]

LIBRARY is fakes/fake_cufile.c, compiled, and SCRATCH a directory for this program. Each step is
done here, and an error in one is this program's; a MiB has 64 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator
from gds._support import ON_NVME, fake_cufile

from nvmeio.cli.measure import machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KIB_64 = 1 << 16
SIZE = 64 * KIB_64
KEPT = 3 * KIB_64  # of what CUDA says is free; it does not give it
# Libraries that put nothing on the stand-in.
OF_OTHERS = {"torch.load", "safetensors", "DeepSpeed's handle", "torch GdsFile"}
OF_4_BITS = "a model of 4 bits"  # the step that needs transformers


class Graph:
    """What is captured is done at once, and once."""

    def replay(self) -> None:
        pass


def program(patch: pytest.MonkeyPatch) -> Any:
    """The module, where a MiB has 64 KiB."""
    patch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_check")
    patch.setattr(module.common, "MIB", KIB_64)
    return module


def prepare(patch: pytest.MonkeyPatch, gpu_check: Any, cuda: Accelerator) -> None:
    """Steps are done here, on the stand-in, whose cuFile can be used."""

    def run_here(name: str, plan: Any, arguments: Any, directory: Path, limit: float) -> Any:
        if name in OF_OTHERS:
            return {"read": {"gb_per_s": 1.0, "cpu_s_per_gb": 1.0}}
        cuda.take_back(waits=True)
        room = (16 if name == "a full device" else 100) << 20
        cuda.limit_bytes = cuda.in_use_bytes + room
        step = gpu_check.Step(directory, arguments.size, "cuda")
        return json.loads(json.dumps(plan.work(step)))

    def usable(found: machine.CuFile, directories: object) -> machine.CuFile:
        return dataclasses.replace(found, usable=True, driver="opens", reason="")

    own_info = torch.cuda.mem_get_info

    def more_than_there_is(*given: Any) -> tuple[int, int]:
        free, total = own_info(*given)
        return free + KEPT, total

    patch.setattr(torch.version, "cuda", None)  # by which steps tell a GPU, and what is traced
    patch.setattr(gpu_check, "run_step", run_here)
    patch.setattr(gpu_check.common, "TURNS", 1)
    patch.setattr(machine, "look_into_cufile", usable)
    for name, value in {
        "get_device_name": lambda: "a stand-in",
        "mem_get_info": more_than_there_is,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *given: True,
        "CUDAGraph": Graph,
        "graph": lambda graph: contextlib.nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, value)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("scratch", type=Path)
    arguments, rest = parser.parse_known_args(words)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        gpu_check = program(patch)
        import_what_steps_need(gpu_check, rest)
        with (
            fake_cufile(arguments.library, arguments.scratch, patch) as cufile,
            accelerator(patch, Pace.EAGER, Pace.EAGER) as cuda,
        ):
            cufile.dstatus = cufile.fflags = ON_NVME
            prepare(patch, gpu_check, cuda)
            gpu_check.main(rest)


def import_what_steps_need(gpu_check: Any, words: list[str]) -> None:
    """Transformers, which reads torch's own classes as it is imported: seconds of CPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="ABCD")
    parts = parser.parse_known_args(words)[0].parts
    if OF_4_BITS in gpu_check.steps(True, parts):
        try:
            importlib.import_module("transformers").LlamaForCausalLM  # noqa: B018
        except ImportError:
            OF_OTHERS.add(OF_4_BITS)


if __name__ == "__main__":
    main(sys.argv[1:])
