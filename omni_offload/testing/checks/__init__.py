"""The checks, one list of them."""

from omni_offload.testing.checks.adapters import check_adapters
from omni_offload.testing.checks.changes import (
    check_casts,
    check_casts_within_calls,
    check_replaced_component,
    check_shared_component,
    check_structure,
    check_user_hooks,
)
from omni_offload.testing.checks.copies import check_deepcopy, check_save, check_save_pretrained
from omni_offload.testing.checks.declarations import check_case, check_discovery, check_plan, check_protocols, check_signatures
from omni_offload.testing.checks.edits import check_edits, check_edits_within_calls
from omni_offload.testing.checks.failures import (
    check_failing_activations,
    check_failing_callback,
    check_failing_loads,
    check_failing_uses,
    check_threads,
)
from omni_offload.testing.checks.interrupts import (
    check_interrupted_call,
    check_interrupted_disable,
    check_interrupted_enable,
    check_rollback,
)
from omni_offload.testing.checks.lifecycle import (
    check_cycles,
    check_enable_from_device,
    check_execution_device,
    check_idempotence,
    check_identity,
    check_inference_modes,
    check_repeated_calls,
    check_round_trip,
    check_second_device,
)
from omni_offload.testing.checks.memory import check_budget, check_host_budget, check_peak, check_report, check_traffic
from omni_offload.testing.checks.numerics import (
    check_numerics,
    check_numerics_on_least_budget,
    check_numerics_unpinned,
    check_races,
    check_streams,
)
from omni_offload.testing.checks.refusals import check_autograd, check_foreign_offload, check_stray_use, check_to_device
from omni_offload.testing.checks.residency import (
    check_captured_methods,
    check_entry_points,
    check_keep_between_calls,
    check_on_device,
    check_release,
    check_residency,
    check_unselected_stay,
    check_work_on_device,
)
from omni_offload.testing.checks.streaming import check_block_order, check_block_report, check_residents, check_slots
from omni_offload.testing.checks.weights import (
    check_buffers,
    check_shared_weight,
    check_state_dict,
    check_ties,
    check_written_weights,
)

__all__ = ["CHECKS"]

CHECKS = (
    check_case,
    check_protocols,
    check_discovery,
    check_plan,
    check_signatures,
    check_round_trip,
    check_identity,
    check_idempotence,
    check_cycles,
    check_repeated_calls,
    check_enable_from_device,
    check_execution_device,
    check_second_device,
    check_inference_modes,
    check_numerics,
    check_numerics_unpinned,
    check_numerics_on_least_budget,
    check_residency,
    check_work_on_device,
    check_entry_points,
    check_captured_methods,
    check_release,
    check_on_device,
    check_unselected_stay,
    check_keep_between_calls,
    check_peak,
    check_budget,
    check_host_budget,
    check_traffic,
    check_report,
    check_slots,
    check_residents,
    check_block_order,
    check_block_report,
    check_buffers,
    check_written_weights,
    check_ties,
    check_shared_weight,
    check_state_dict,
    check_save,
    check_save_pretrained,
    check_deepcopy,
    check_edits,
    check_edits_within_calls,
    check_structure,
    check_casts,
    check_casts_within_calls,
    check_replaced_component,
    check_shared_component,
    check_user_hooks,
    check_adapters,
    check_rollback,
    check_failing_uses,
    check_failing_callback,
    check_failing_loads,
    check_failing_activations,
    check_interrupted_enable,
    check_interrupted_disable,
    check_interrupted_call,
    check_autograd,
    check_foreign_offload,
    check_to_device,
    check_stray_use,
    check_threads,
    check_streams,
    check_races,
)
"""Every check, in the order in which they run: the declarations first, the races of all others last."""
