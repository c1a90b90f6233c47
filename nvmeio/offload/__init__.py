"""Training with optimizer state, gradients and parameters on the drive.

Reading order: `_subgroups` (where things lie), `_pipeline` (the three stages), `_state_store`
(generations), `_transactions` (one thread changes it all), `_state_swapper` and `_step`,
`optimizer`, `gradients`, `module`, `activations`. docs/offload.md has the arithmetic.
"""

from nvmeio.offload._optimizer.memory_plans import MemoryPlan as MemoryPlan
from nvmeio.offload._step.pipeline import Times as Times
from nvmeio.offload.activations import SwappedActivations as SwappedActivations
from nvmeio.offload.config import Offloaded as Offloaded
from nvmeio.offload.config import offload as offload
from nvmeio.offload.converting import follow as follow
from nvmeio.offload.converting import swapped_like as swapped_like
from nvmeio.offload.module import SwappedModule as SwappedModule
from nvmeio.offload.optimizer import SwappedOptimizer as SwappedOptimizer

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
