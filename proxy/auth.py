"""Bearer API keys, and the tenant that follows from one, or from a header that a trusted gateway sets.

A tenant is a digest: it salts feature keys and vLLM's prefix cache, so that nobody can probe for what others sent.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from epd_serve.errors import RequestError
from proxy.settings import ProxySettings

DEFAULT_TENANT = "default"


class AuthenticationError(RequestError):
    """No key, or not one of ours."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


def tenant_of(headers: Headers, settings: ProxySettings) -> str:
    """The tenant of a request; `default` where nothing tells tenants apart.

    With keys and a tenant header both, a tenant is a pair of the two: no client can name itself into another key's.

    Raises:
        AuthenticationError: keys are configured and this is none of them.
        RequestError: the tenant header is there more than once.
    """
    key = _key_of(headers.get("authorization"), settings.api_keys)
    name = _named(headers, settings.tenant_header)
    if name:
        return _digest(b"named/" + key + b"\0" + name.encode("utf-8", "surrogateescape"))
    return _digest(key) if key else DEFAULT_TENANT


def _key_of(authorization: str | None, api_keys: Sequence[str]) -> bytes:
    if not api_keys:
        return b""
    scheme, _, token = (authorization or "").partition(" ")
    given = token.strip().encode("utf-8", "replace")
    # Every key is compared, so that the time taken tells nothing about which one was close.
    matches = [hmac.compare_digest(given, key.encode()) for key in api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise AuthenticationError("Missing or invalid API key: send it as `Authorization: Bearer <key>`.")
    return given


def _named(headers: Headers, tenant_header: str) -> str:
    values = headers.getlist(tenant_header) if tenant_header else []
    if len(values) > 1:  # the gateway's and the client's: which one is whose cannot be told
        raise RequestError(f"The header {tenant_header} must be sent once.", param=tenant_header)
    return values[0].strip() if values else ""


def _digest(name: bytes) -> str:
    return hashlib.sha256(b"epd-serve/tenant/" + name).hexdigest()[:32]
