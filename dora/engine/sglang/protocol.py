"""Paths and constants of SGLang's HTTP protocol, checked against 0.5.18 to 0.5.23.

The embedded engine and the client share nothing else, so that they cannot share a misunderstanding of the protocol.
"""

from __future__ import annotations

from typing import Final

GENERATE: Final = "/generate"
ABORT_REQUEST: Final = "/abort_request"
PAUSE_GENERATION: Final = "/pause_generation"
CONTINUE_GENERATION: Final = "/continue_generation"
UPDATE_WEIGHTS_FROM_DISK: Final = "/update_weights_from_disk"
UPDATE_WEIGHT_VERSION: Final = "/update_weight_version"
BEGIN_WEIGHT_UPDATE: Final = "/begin_weight_update"
END_WEIGHT_UPDATE: Final = "/end_weight_update"
INIT_WEIGHTS_UPDATE_GROUP: Final = "/init_weights_update_group"
UPDATE_WEIGHTS_FROM_DISTRIBUTED: Final = "/update_weights_from_distributed"
DESTROY_WEIGHTS_UPDATE_GROUP: Final = "/destroy_weights_update_group"
WEIGHTS_CHECKER: Final = "/weights_checker"
LOAD_LORA_ADAPTER: Final = "/load_lora_adapter"
UNLOAD_LORA_ADAPTER: Final = "/unload_lora_adapter"
MODELS: Final = "/v1/models"  # the model and its loaded adapters
FLUSH_CACHE: Final = "/flush_cache"
HEALTH: Final = "/health"
HEALTH_GENERATE: Final = "/health_generate"
READY: Final = "/ready"
MODEL_INFO: Final = "/model_info"
SERVER_INFO: Final = "/server_info"
LOADS: Final = "/v1/loads"
GET_LOAD: Final = "/get_load"  # older form of /v1/loads; not used by the client
METRICS: Final = "/metrics"

#: How a server refuses a disk update whose folder it cannot read; nothing has changed then.
UNREAD: Final = "Failed to get weights iterator"

#: Last event of every stream.
DONE: Final = "[DONE]"

#: Keys of /server_info that hold secrets; dropped before anything is stored or logged.
SECRET_SERVER_INFO_KEYS: Final = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
