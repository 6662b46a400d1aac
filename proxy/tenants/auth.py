"""Bearer API keys, and the tenant that follows from one, or from a header that a trusted gateway sets.

A tenant is a digest: it salts feature keys and vLLM's prefix cache, so that nobody can probe for what others sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers

from epd_serve.errors import RequestError
from proxy.config.settings import ProxySettings

DEFAULT_TENANT = "default"


class AuthenticationError(RequestError):
    """No key, or not one of ours."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Caller(NamedTuple):
    """Who asks.

    Attributes:
        tenant: whose features and prefixes are shared with it; `default` where nothing tells tenants apart.
        account: whom its requests count against: the key, or the tenant where there are no keys.
    """

    tenant: str
    account: str


ANYBODY = Caller(DEFAULT_TENANT, DEFAULT_TENANT)


def tenant_of(headers: Headers, settings: ProxySettings) -> str:
    """The tenant of a request. Raises as `caller_of`."""
    return caller_of(headers, settings).tenant


def caller_of(headers: Headers, settings: ProxySettings) -> Caller:
    """Who sent a request with these headers.

    With keys and a tenant header both, a tenant is a pair of the two: no client can name itself into another key's,
    and all tenants that it names count against its key.

    Raises:
        AuthenticationError: keys are configured and this is none of them.
        RequestError: the tenant header is there more than once.
    """
    if not (settings.api_keys or settings.tenant_header):
        return ANYBODY
    key = _key_of(headers.get("authorization"), settings.api_keys)
    name = _named(headers, settings.tenant_header)
    account = _digest(key) if key else DEFAULT_TENANT
    tenant = account
    if name:
        tenant = _digest(b"named/" + key + b"\0" + name.encode("utf-8", "surrogateescape"))
    return Caller(tenant, account if key else tenant)


def bears(headers: Headers, key: str) -> bool:
    """Whether a request has this one bearer key, in a time that tells nothing about it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), key.encode())
    return right and scheme.lower() == "bearer"


def _key_of(authorization: str | None, api_keys: Sequence[str]) -> bytes:
    if not api_keys:
        return b""
    scheme, _, token = (authorization or "").partition(" ")
    token_bytes = token.strip().encode("utf-8", "replace")
    # Every key is compared, so that the time taken tells nothing about which one was close.
    matches = [hmac.compare_digest(token_bytes, key.encode()) for key in api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise AuthenticationError("Missing or invalid API key: send it as `Authorization: Bearer <key>`.")
    return token_bytes


def _named(headers: Headers, tenant_header: str) -> str:
    values = headers.getlist(tenant_header) if tenant_header else []
    if len(values) > 1:  # the gateway's and the client's: which one is whose cannot be told
        raise RequestError(f"The header {tenant_header} must be sent once.", param=tenant_header)
    return values[0].strip() if values else ""


def _digest(name: bytes) -> str:
    return hashlib.sha256(b"epd-serve/tenant/" + name).hexdigest()[:32]
