"""Why the throughput loop and the load loop decided as they did, under the names of Dynamo's enums."""

from __future__ import annotations

import enum


class LoadScaling(enum.StrEnum):
    """`load_scaling_decision`, of all roles or of one."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_FPM_DATA = "no_fpm_data"
    SCALING_IN_PROGRESS = "scaling_in_progress"
    WORKER_COUNT_MISMATCH = "worker_count_mismatch"
    INSUFFICIENT_DATA = "insufficient_data"
    PARTNER_NOT_READY = "partner_not_ready"
    """The other role of a disaggregated graph cannot be judged, so that this one holds, too."""
    NO_CHANGE = "no_change"
    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    SCALE_DOWN_CAPPED_BY_THROUGHPUT = "scale_down_capped_by_throughput"
    SCALE_DOWN_REFUSED_CONSOLIDATION = "scale_down_refused_consolidation"
    """The load is low; it would not be, on one engine less."""
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"


class ThroughputScaling(enum.StrEnum):
    """`throughput_scaling_decision`, of all roles or of one."""

    UNSET = "unset"
    DISABLED = "disabled"
    NO_TRAFFIC_DATA = "no_traffic_data"
    PREDICT_FAILED = "predict_failed"
    MODEL_NOT_READY = "model_not_ready"
    PARTNER_NOT_READY = "partner_not_ready"
    NO_CHANGE = "no_change"
    SET_LOWER_BOUND = "set_lower_bound"
    SCALE = "scale"
    GPU_BUDGET_GUARD_HOLD = "gpu_budget_guard_hold"
    GPU_BUDGET_RECONCILE = "gpu_budget_reconcile"
    OVERRIDE_BY_USER_PLUGIN = "override_by_user_plugin"
