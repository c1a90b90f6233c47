"""How scripts begin that end or fork while operations are in flight."""

# What the scripts have in common. `hold` keeps what is started in flight until `let_go`.
PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
from pathlib import Path
import torch
import nvmeio
from nvmeio.engines.libaio import LibaioEngine
from nvmeio.testing import FakeEngine
from faults._support import FaultyKernel, aligned, bytes_of, eventually, misaligned, noise

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
KIB, MIB = 1 << 10, 1 << 20
kind, library, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if kind == "libaio":
    kernel = FaultyKernel(library)
    engine = LibaioEngine(kernel.table)
    hold, let_go = kernel.close_gate, kernel.open_gate
else:
    gate = threading.Event()
    gate.set()
    engine = FakeEngine(hold=gate)
    hold, let_go = gate.clear, gate.set
handle = nvmeio.AioHandle(block_size=64 * KIB, queue_depth=8, engine=engine)

def later(seconds, function):
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()

def let_go_when_it_is_told():  # by a warning; a little later, so that it is waited for
    told, warn = threading.Event(), warnings.warn

    def warning(*args, **named):
        told.set()
        warn(*args, **named)

    def then():
        told.wait()
        time.sleep(0.3)
        let_go()

    warnings.warn = warning
    threading.Thread(target=then, daemon=True).start()
"""
SHOW_RESOURCE_WARNINGS = ("-W", "always::ResourceWarning")


def succeeded(ran):
    """Ended as it should, and silently."""
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    return ran.stdout
