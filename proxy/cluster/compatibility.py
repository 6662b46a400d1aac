"""What has to be equal on all machines of a cluster, compared when a stage joins. Pure.

Later it would show as wrong answers (weights, processing flags) or as refused KV links (vLLM, device kind).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from epd_serve.cluster import NAME, JoinRefusedError, JoinRequest
from epd_serve.roles import Role

MOST_RANKS, MOST_DEVICES = 1024, 1 << 16
_URL = re.compile(r"http://(?P<host>[0-9.]+):(?P<port>[0-9]{1,5})")
_CHANNEL = re.compile(r"tcp://(?P<host>[0-9.]+):(?P<port>[0-9]{1,5})(\+\{rank\})?")
"""A KV address, as in `StageWiring`."""


@dataclass(frozen=True)
class ClusterIdentity:
    """What the head serves. `revision` and `processing` as in `JoinRequest`; `version`: of epd-serve here."""

    model: str
    revision: str
    processing: str
    multimodal: bool
    version: str


def check_admission(
    request: JoinRequest, identity: ClusterIdentity, present: Mapping[str, JoinRequest], caller: str = ""
) -> None:
    """Refuse a stage that could not serve with the rest.

    Args:
        present: the other members that live, by name, as they joined.
        caller: address that the request came from, "" when it is not known.

    Raises:
        JoinRefusedError: names what differs.
    """
    _check_names(request)
    _check_address(request, caller)
    _check_role(request, identity)
    _check_versions(request, identity, present)
    _check_model(request, identity)


def _check_names(request: JoinRequest) -> None:
    """Names become file names on the stage's machine and labels in /metrics; numbers become loops."""
    if request.instance and not NAME.fullmatch(request.instance):
        raise JoinRefusedError(
            f"the name {request.instance[:80]!r} is not made of letters, digits, '.', '_' and '-' (64 at most)",
            param="--instance",
            code="bad_name",
        )
    if request.incarnation and not NAME.fullmatch(request.incarnation):
        raise JoinRefusedError("the incarnation is no name", code="bad_name")
    places = (request.devices, request.cpu_cores)
    places_fit = all(len(ids) <= MOST_RANKS and all(0 <= one < MOST_DEVICES for one in ids) for ids in places)
    if not (1 <= request.tp <= MOST_RANKS and places_fit):  # JSON's numbers may be too long to be shown
        raise JoinRefusedError("tp or devices are no place to run", param="--device-ids", code="bad_width")


def _check_address(request: JoinRequest, caller: str) -> None:
    """Every address is the stage's own: what the others connect to, with the stages' key, is where it says it is."""
    try:
        host = ipaddress.IPv4Address(request.host)
    except ValueError:
        raise JoinRefusedError(
            f"host {request.host[:80]!r} is no IPv4 address", param="--host", code="bad_address"
        ) from None
    if host.is_unspecified or host.is_multicast:
        raise JoinRefusedError(f"host {request.host} is no machine's address", param="--host", code="bad_address")
    for what, address, form, expected in (
        ("url", request.url, _URL, "http://HOST:PORT"),
        ("kv_endpoint", request.kv_endpoint, _CHANNEL, "tcp://HOST:PORT"),
        ("kv_workers", request.kv_workers, _CHANNEL, "tcp://HOST:PORT"),
    ):
        match = form.fullmatch(address)
        right = match is not None and match["host"] == request.host and 1 <= int(match["port"]) <= 65535
        if not right and (address or what == "url"):
            raise JoinRefusedError(
                f"{what} {address[:80]!r} is not {expected} of {request.host}", param="--host", code="bad_address"
            )
    if caller and _is_loopback(request.host) and not _is_loopback(caller):
        raise JoinRefusedError(
            f"this stage is at {caller} but says --host {request.host}, which nobody else reaches; give it the "
            "address of its machine",
            param="--host",
            code="bad_address",
        )


def _check_role(request: JoinRequest, identity: ClusterIdentity) -> None:
    reason = ""
    if request.role is Role.ED:
        reason = "ED has no encode-only path inside one vLLM instance; run E and D apart"
    elif request.role.sends_features and not identity.multimodal:
        reason = f"{identity.model} is a text-only model: there is nothing to encode"
    if reason:
        raise JoinRefusedError(reason, param="--role", code="role_cannot_serve")


def _check_versions(request: JoinRequest, identity: ClusterIdentity, present: Mapping[str, JoinRequest]) -> None:
    """epd-serve's is the head's. vLLM and the device kind are those of the stages that are here: the head needs
    neither."""
    theirs = [("the head", {"epd-serve": identity.version})]
    theirs += [(name, other.versions) for name, other in present.items()][:1]
    for whose, versions in theirs:
        for what, version in versions.items():
            if (mine := request.versions.get(what, "none")) != version:
                raise JoinRefusedError(
                    f"{what} differs: {whose} has {version}, this stage {mine}",
                    code="device_differs" if what == "device" else "version_differs",
                )


def _check_model(request: JoinRequest, identity: ClusterIdentity) -> None:
    if identity.revision and request.revision:
        if identity.revision != request.revision:
            raise JoinRefusedError(
                f"the weights differ: the head has {identity.model} revision {identity.revision}, this stage "
                f"{request.model} revision {request.revision}; copy the same files to both",
                code="model_differs",
            )
    elif identity.model != request.model:
        raise JoinRefusedError(f"the head serves {identity.model}, this stage {request.model}", code="model_differs")
    if identity.processing != request.processing:
        raise JoinRefusedError(
            f"vLLM flags differ: the head has {identity.processing or 'none'}, this stage "
            f"{request.processing or 'none'}: the same image would mean different things; give all the same flags "
            "after --",
            code="processing_differs",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
