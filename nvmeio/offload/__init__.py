"""Training with optimizer state, gradients and parameters on the drive.

Reading order: `_swap_files` (where things lie, and how they move), `_generations` (which state is
complete; one thread changes it all), `_optimizer` (opened, stepped, loaded), `optimizer`; `_module`
and `module` (parameters); `activations`; `_parking` and `parking` (all of it for a while).
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
from nvmeio.offload.parking import Parked as Parked
from nvmeio.offload.parking import park as park
from nvmeio.offload.parking import resume_parked as resume_parked

__all__ = [
    "MemoryPlan",
    "Offloaded",
    "Parked",
    "SwappedActivations",
    "SwappedModule",
    "SwappedOptimizer",
    "Times",
    "follow",
    "offload",
    "park",
    "resume_parked",
    "swapped_like",
]
