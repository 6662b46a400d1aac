"""vLLM as our connector meets it: the base class it extends, requests, and what the scheduler says of a step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

GRID = {"image_grid_thw": [[1, 4, 4]]}
Make = Callable[..., Any]
"""Makes a connector of a role and a side; further fields of its wiring by name."""


class ECConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """What our connector uses of vLLM's `ECConnectorBase`."""

    def __init__(self, config: Any, role: ECConnectorRole) -> None:
        self._vllm_config, self._metadata = config, None
        self.is_producer = config.ec_transfer_config.is_ec_producer
        self.is_consumer = config.ec_transfer_config.is_ec_consumer

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


def request(
    name: str, *keys: str, apart: int = 0, bare: bool = False, status: str = "FINISHED_STOPPED", **xargs: str
) -> Any:
    """Items of ten tokens, the first one at the beginning, each `apart` from the one before."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=None,
        num_tokens=apart * len(keys) + 10,
        mm_features=[
            SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=place * apart, length=10), bare=bare)
            for place, key in enumerate(keys)
        ],
        sampling_params=SimpleNamespace(extra_args=xargs or None, seed=None),
        status=SimpleNamespace(name=status),
    )


def output(*finished: str, tokens: int = 1, freed: Sequence[str] = ()) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished), total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=list(freed)
    )
