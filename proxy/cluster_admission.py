"""What has to be equal on all machines of a cluster, compared when a stage joins. Pure.

Later it would show as wrong answers (weights, processing flags) or as refused KV links (vLLM, device kind, width).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from epd_serve.cluster import JoinRefusedError, JoinRequest
from epd_serve.roles import Role


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
    _check_address(request, caller)
    _check_role(request, identity)
    _check_versions(request, identity, present)
    _check_model(request, identity)
    _check_width(request, present)


def _check_address(request: JoinRequest, caller: str) -> None:
    address = urlsplit(request.url)
    if address.scheme != "http" or address.hostname is None or address.path:
        raise JoinRefusedError(f"url {request.url!r} is not http://HOST:PORT", code="bad_address")
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
            f"{request.processing or 'none'}: the same picture would mean different things; give all the same flags "
            "after --",
            code="processing_differs",
        )


def _check_width(request: JoinRequest, present: Mapping[str, JoinRequest]) -> None:
    role = request.role
    for name, other in present.items():
        linked = (role.sends_kv and other.role.takes_kv) or (role.takes_kv and other.role.sends_kv)
        if linked and other.tp != request.tp:
            raise JoinRefusedError(
                f"{role} has {request.tp} ranks, {name} {other.tp}: KV travels between ranks of the same number",
                param="--device-ids",
                code="width_differs",
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
