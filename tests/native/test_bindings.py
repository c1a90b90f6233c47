"""What the shim's module does beside handing out the shim."""

from __future__ import annotations

import gc
import importlib
import weakref
from pathlib import Path

import pytest
import support
import torch

from nvmeio import _bindings
from nvmeio._bindings import memory_at, packed, protection

SHIM = Path(__file__).parents[2] / "native_shim"


class Owner:
    """Something that can be referred to weakly."""


def test_memory_is_seen_and_written_to_as_bytes() -> None:
    tensor = torch.arange(16, dtype=torch.uint8)
    memory = memory_at(tensor.data_ptr() + 4, 8)
    assert bytes(memory) == bytes(range(4, 12))
    memory[2:4] = b"xy"
    assert tensor[6:8].tolist() == list(b"xy")
    assert len(memory_at(tensor.data_ptr(), 0)) == 0


def test_memory_keeps_its_owner_for_as_long_as_anybody_uses_it() -> None:
    tensor, owner = torch.zeros(64, dtype=torch.uint8), Owner()
    gone = weakref.ref(owner)
    laid_over = torch.frombuffer(memory_at(tensor.data_ptr(), 64, owner), dtype=torch.uint8)
    storage = laid_over.untyped_storage()
    del owner, laid_over
    gc.collect()
    assert gone() is not None
    del storage
    assert gone() is None  # by its count of references: no collector is needed


def test_a_length_that_was_not_met_before_makes_no_class() -> None:
    """An array of ctypes made one for each, which stays."""
    tensor = torch.zeros(1 << 12, dtype=torch.uint8)
    kinds = {type(memory_at(tensor.data_ptr(), nbytes).obj) for nbytes in range(1, 1 << 12)}
    assert len(kinds) == 1


LIBRARIES = {
    "pump": ("nvmeio._native", _bindings.INTERFACE),
    "protection": ("nvmeio._native_protection", protection.INTERFACE),
    "packed": ("nvmeio._native_packed", packed.INTERFACE),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_interface_is_that_of_the_declarations(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SHIM))
    build_shim = importlib.import_module("build_shim")
    assert sorted(build_shim.FILES) == sorted(LIBRARIES)
    module, interface = LIBRARIES[library]
    assert build_shim.MODULES[library] == module
    assert build_shim.interface(library) == interface, "write the new number into nvmeio/_bindings"


def test_every_source_file_is_built_into_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SHIM))
    files = importlib.import_module("build_shim").FILES
    built = {
        (SHIM / library / f"{name}.c").resolve()
        for library, names in files.items()
        for name in names
    }
    assert built == {path.resolve() for path in SHIM.rglob("*.c")}


USES = {
    "pump": "nvmeio.AioHandle",
    "protection": "from nvmeio._memory.copy_on_write import support; support()",
    "packed": "from nvmeio._bindings import packed; packed.lib",
}


@pytest.mark.slow
@pytest.mark.parametrize("number", ["", "1"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_of_another_version_is_refused(library: str, number: str) -> None:
    """Before there was a number, or with another one; a call into it would end the program."""
    module, _ = LIBRARIES[library]
    ended = support.run_python(
        f"""
        import sys, types
        shim = types.ModuleType("{module}")
        shim.ffi = shim.lib = types.SimpleNamespace()
        if "{number}":
            shim.lib.NV_INTERFACE = int("{number}")
        import nvmeio
        sys.modules["{module}"] = shim
        {USES[library]}
        """,
        fresh=True,
    )
    assert ended.returncode == 1
    assert "built for another version of nvmeio" in ended.stderr
    assert module in ended.stderr
    assert "pip install" in ended.stderr


def test_a_plain_read_loads_the_pump_alone(tmp_path: Path) -> None:
    """Write protection and products with packed weights are other subjects, for other programs."""
    (tmp_path / "file").write_bytes(bytes(8192))
    ended = support.run_python(
        f"""
        import torch
        import nvmeio
        tensor = torch.ones(8192, dtype=torch.uint8)
        for engine in ("libaio", "threads"):
            with nvmeio.AioHandle(engine=engine) as handle:
                handle.sync_pread(tensor, {str(tmp_path / "file")!r})
        import nvmeio.inference
        with open("/proc/self/maps") as maps:
            libraries = {{line.split("/")[-1].split(".")[0] for line in maps if "/_native" in line}}
        print(int(tensor.sum()), *sorted(libraries))
        """,
        fresh=True,
    )
    assert (ended.stdout, ended.stderr) == ("0 _native\n", "")
