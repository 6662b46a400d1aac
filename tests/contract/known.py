"""What does not fit and is left so, each with its reason. Data; one that no longer occurs is a finding of its own."""

from __future__ import annotations

from dataclasses import dataclass

from tests.contract.findings import Finding


@dataclass(frozen=True)
class Known:
    """`about`: words that the finding's message contains; `reason`: what becomes of our users there."""

    wheel: str
    path: str
    about: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return (finding.wheel, finding.path) == (self.wheel, self.path) and self.about in finding.message


_NPU = "mooncake-transfer-engine-npu 0.3.11.post1"
_CALLS = (
    "Its client keeps limits of its own, and the start warns of it where features use it: our deadline and breaker "
    "(`store/mooncake/breaker.py`) end the call for whoever waits; the memory that it was given may stay taken for up "
    "to 30 s."
)
_QUEUES = (
    "TCP only, and Ascend's protocol is another one. Over TCP a write of 200 MB may fail with this release: warned of "
    "at the start."
)

KNOWN: tuple[Known, ...] = (
    Known(_NPU, "store/mooncake/client.py", "MC_RPC_TIMEOUT_MS", _CALLS),
    Known(_NPU, "store/mooncake/client.py", "MC_RPC_CONNECT_TIMEOUT_MS", _CALLS),
    Known(_NPU, "store/mooncake/client.py", "MC_TCP_STATUS_TIMEOUT_SEC", _CALLS),
    Known(_NPU, "store/mooncake/client.py", "MC_TCP_PROGRESS_TIMEOUT_SEC", _CALLS),
    Known(_NPU, "epd_serve/engine/kv/mooncake_endpoint.py", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", _QUEUES),
    Known(_NPU, "epd_serve/engine/kv/mooncake_endpoint.py", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", _QUEUES),
    Known(
        _NPU,
        "store/mooncake/master.py",
        "--metrics_host",
        "Its `mooncake_master` ends at once with `unknown command line flag`. It is never started: `what_is_missing` "
        "(`deploy/options/mooncake.py`) refuses it by its version.",
    ),
)
