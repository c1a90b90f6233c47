"""One SGLang engine on a CPU, which says its tokens: `_engine.py MODEL [OPTIONS [TOKENS TABLES]]`.

SGLang's compiled kernels are imported, and but for one none of them is called on the way that this
takes: where they are not installed, names stand for them. Its hierarchical cache wants a GPU for
three things: page-locked memory, streams with events, and that kernel, which copies tokens between
the pool of the device and that of the host. Here they are nothing, nothing, and indexing.

Args:
    TOKENS: A prompt, in place of two short ones; also says how much of it was not computed.
    TABLES: Of block stores, as a pattern: waits until its pages are there.
"""

from __future__ import annotations

import builtins
import glob
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from nvmeio._kv_blocks.table import HEADER_BYTES, RECORD_BYTES


class _Name:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: sgl_kernel is not installed")


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module: Any = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: getattr(_Name(spec.name), name)
        return module

    def exec_module(self, module: Any) -> None:
        pass


def _copy_tokens(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


class _Event:
    """Of a stream on which everything is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Runtime:
    """The CUDA runtime, as far as memory is made page-locked with it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


def _stand_in_for_a_gpu() -> None:
    """What the hierarchical cache asks for; nothing else of torch's CUDA is used."""
    cpu: Any = torch.cpu
    cuda: Any = torch.cuda
    names: Any = builtins
    cpu.Event = _Event
    for name in ("wait_event", "wait_stream", "synchronize", "record_event"):
        if not hasattr(cpu.Stream, name):
            setattr(cpu.Stream, name, lambda *_: _Event())
    cuda.cudart = _Runtime
    # SGLang imports it where there is a GPU only, and its code looks here last.
    names.transfer_kv_direct = _copy_tokens


# Its workers import this file anew, before they import SGLang.
if importlib.util.find_spec("sgl_kernel") is None:
    sys.meta_path.append(_Kernels())
_stand_in_for_a_gpu()
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.6,
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "log_level": "info",
}
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def _flushed(engine: Any) -> bool:
    """Whether SGLang has flushed its caches: it refuses while it backs up, or is not idle yet."""
    began = time.monotonic()
    while not engine.flush_cache().success:
        if time.monotonic() - began > 60:
            return False
        time.sleep(0.1)
    return True


def _wait_for_blocks(tables: str, count: int) -> None:
    """SGLang writes pages behind the answer."""
    until = time.monotonic() + 120
    while True:
        found = b"".join(Path(name).read_bytes()[HEADER_BYTES:] for name in glob.glob(tables))
        records = (found[at : at + RECORD_BYTES] for at in range(0, len(found), RECORD_BYTES))
        if sum(any(record[-24:]) for record in records) >= count:  # of lengths and checksums
            return
        assert time.monotonic() < until
        time.sleep(0.2)  # nothing tells when they are there


def main() -> None:
    import sglang

    model, *options = sys.argv[1:]
    engine: Any = sglang.Engine(
        model_path=model, **{**OPTIONS, **json.loads((options or ["{}"])[0])}
    )
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    found: dict[str, Any] = {"tokens": [], "update": None}
    try:
        if len(options) > 1:
            answer = engine.generate(input_ids=json.loads(options[1]), sampling_params=SAMPLING)
            found["tokens"] = answer["output_ids"]
            found["pages"] = len(json.loads(options[1])) // json.loads(options[0])["page_size"] - 1
            found["cached"] = answer["meta_info"]["cached_tokens"]
            _wait_for_blocks(options[2], found["pages"])
            found["flush"] = _flushed(engine)
            answer = engine.generate(input_ids=json.loads(options[1]), sampling_params=SAMPLING)
            found["cached_after_flush"] = answer["meta_info"]["cached_tokens"]
            return
        for _ in range(2):
            answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING)
            found["tokens"].append([answer["output_ids"] for answer in answers])
        found["update"] = engine.update_weights_from_disk(model)[:2]
        answers = engine.generate(input_ids=prompts, sampling_params=SAMPLING)
        found["tokens"].append([answer["output_ids"] for answer in answers])
        found["weight"] = engine.get_weights_by_name("model.layers.0.self_attn.q_proj.weight")
    finally:
        print("FOUND", json.dumps(found, default=str), flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main()
