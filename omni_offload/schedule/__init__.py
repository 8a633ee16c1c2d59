"""The arithmetic of streaming: what a step takes with given residents and slots, and which blocks to keep resident.

A model's blocks run one after another, step after step. Residents are on the device; the others stream through `slots` device
buffers over one copy engine. With copies t and computations c, and streamed blocks numbered k = 0, 1, ... over all steps, a copy
starts when the engine and its slot are free, and a block runs when its copy has landed and the blocks before it are done::

    A[k] = max(A[k-1], C[k-slots]) + t[k]
    C[k] = max(C[k-1] + residents between, A[k]) + c[k]

No placement is faster than `bound`, the larger of all computation and all copies. Residents that are spread over the step reach
it; the same residents at its start leave the copy engine idle while they run (up to 1.8 times the bound).
"""

from omni_offload.schedule.placement import assumed_costs, better_residents, choose_residents, least_bytes
from omni_offload.schedule.recurrence import BlockCost, Placement, bound, spread, step_time

__all__ = ["BlockCost", "Placement", "assumed_costs", "better_residents", "bound", "choose_residents", "least_bytes", "spread", "step_time"]
