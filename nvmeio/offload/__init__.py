"""Training with optimizer state, gradients and parameters on the drive.

Reading order: `_swap_files` (where things lie, and how they move), `_generations` (which state is
complete; one thread changes it all), `_optimizer` (opened, stepped, loaded), `optimizer`; `_module`
and `module` (parameters); `activations`.
docs/offload.md has the arithmetic.
"""

from nvmeio.offload._optimizer.memory_plans import MemoryPlan as MemoryPlan
from nvmeio.offload._optimizer.params import follow as follow
from nvmeio.offload._swap_files.pipeline import Times as Times
from nvmeio.offload.activations import SwappedActivations as SwappedActivations
from nvmeio.offload.config import Offloaded as Offloaded
from nvmeio.offload.config import offload as offload
from nvmeio.offload.module import SwappedModule as SwappedModule
from nvmeio.offload.optimizer import SwappedOptimizer as SwappedOptimizer
from nvmeio.offload.optimizer import swapped_like as swapped_like

__all__ = [
    "MemoryPlan",
    "Offloaded",
    "SwappedActivations",
    "SwappedModule",
    "SwappedOptimizer",
    "Times",
    "follow",
    "offload",
    "swapped_like",
]
