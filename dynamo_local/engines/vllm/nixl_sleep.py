"""NIXL across vLLM's sleep: each wake has a new agent, under a new engine id.

A sleep frees the memory behind the KV cache, and a wake puts other memory behind the same addresses. vLLM's connector
registers that memory with NIXL once, at the start. So its part in each GPU's process is shut down before a sleep: that
deregisters the memory. After the wake a new one registers it again.

Its engine id is new as well (`core.routing.disagg.wake_id`). A peer connects to an id that it does not know, and vLLM
itself then releases what the peer has of the earlier id at the same address. A peer with the earlier id would read
memory that is gone.

Both functions run in the process of EngineCore, which the worker asks by their names.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from dynamo_local.core.routing.disagg import wake_id

CONNECTOR = "NixlConnector"
"""The only connector whose memory can be registered again. Its transfers are pulled."""
CLOSE, OPEN = "dynamo_local_close_transfers", "dynamo_local_open_transfers"


def install() -> None:
    """In the process of EngineCore, which has its module: the worker's utility calls find the two functions.

    Nothing in an engine's other processes.
    """
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        setattr(core.EngineCore, CLOSE, close_transfers)
        setattr(core.EngineCore, OPEN, open_transfers)


def close_transfers(core: Any) -> None:
    """Nothing runs, and no KV waits to be pulled: `pause_generation(mode="wait")` has seen to that."""
    core.model_executor.collective_rpc(_close_in_worker)
    core.scheduler.connector.connector_scheduler.shutdown()  # peers ask it for the metadata of the closed agent


def open_transfers(core: Any) -> None:
    """The memory is there again."""
    connector = core.scheduler.connector
    engine_id = wake_id(connector.engine_id)
    core.model_executor.collective_rpc(_open_in_worker, args=(engine_id,))
    core.vllm_config.kv_transfer_config.engine_id = connector.engine_id = engine_id
    scheduler = connector.connector_scheduler
    scheduler.engine_id = engine_id
    scheduler._stop_event = threading.Event()
    metadata = core.model_executor.get_kv_connector_handshake_metadata() or ()
    connector.set_xfer_handshake_metadata_pp_aware(
        {rank: payload for ranks in metadata if ranks for rank, payload in ranks.items()}
    )


_KEPT: dict[str, Any] = {}
"""In a GPU's process, while it sleeps: the tensors of the KV cache, and how they are copied to a host's buffer."""


def _close_in_worker(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    transfers = connector.connector_worker
    _KEPT.update(caches=transfers.device_kv_caches, copy=transfers.copy_blocks, made=type(transfers))
    transfers.shutdown()
    connector.connector_worker = None


def _open_in_worker(worker: Any, engine_id: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    config = worker.vllm_config
    config.kv_transfer_config.engine_id = connector.engine_id = engine_id
    with set_current_vllm_config(config):
        transfers = _KEPT["made"](config, engine_id, connector.kv_cache_config)
        transfers.register_kv_caches(_KEPT["caches"])
    if _KEPT["copy"] is not None:
        transfers.set_host_xfer_buffer_ops(_KEPT["copy"])
    connector.connector_worker = transfers
    _KEPT.clear()
