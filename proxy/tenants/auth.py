"""Bearer API keys, and the tenant that follows from one, or from a header that a trusted gateway sets.

A tenant is a digest: it salts feature keys and vLLM's prefix cache, so that nobody can probe for what others sent.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import NamedTuple

from starlette.datastructures import Headers

from epd_serve.errors import RequestError
from proxy.config.keys import ApiKey, ApiKeys, digest, tenant_digest
from proxy.config.limits import KeyLimits
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
        limits: of the account, for this process.
    """

    tenant: str
    account: str
    limits: KeyLimits


class Callers:
    """Who sent a request, by the keys as they are now. One per process.

    Args:
        settings: with the keys as they are at first.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._salt = b""
        self._by_digest: dict[bytes, Caller] | None = None
        if settings.api_keys is not None:
            self.go_by(settings.api_keys)

    def go_by(self, keys: ApiKeys) -> None:
        """From now on these are the keys. Requests under way go on."""
        self._salt = bytes.fromhex(keys.salt)
        self._by_digest = {bytes.fromhex(key.hash): self._caller(key) for key in keys.keys}

    def tenant_of(self, headers: Headers) -> str:
        """The tenant of a request. Raises as `caller_of`."""
        return self.caller_of(headers).tenant

    def caller_of(self, headers: Headers) -> Caller:
        """Who sent a request with these headers.

        With keys and a tenant header both, a tenant is a pair of the two: no client can name itself into another
        key's, and all tenants that it names count against its key.

        Raises:
            AuthenticationError: keys are wanted and this is none of them.
            RequestError: the tenant header is there more than once.
        """
        name = _named(headers, self._settings.tenant_header)
        if self._by_digest is None:
            tenant = tenant_digest(f"{DEFAULT_TENANT}\0{name}") if name else DEFAULT_TENANT
            return Caller(tenant, tenant, self._settings.key_limits)
        caller = self._by_digest.get(digest(self._salt, _token(headers)))
        if caller is None:
            raise AuthenticationError(
                "Missing or invalid API key: send it as `Authorization: Bearer <key>`, or as `x-api-key: <key>`."
            )
        return caller._replace(tenant=tenant_digest(f"{caller.tenant}\0{name}")) if name else caller

    def _caller(self, key: ApiKey) -> Caller:
        own = KeyLimits(**key.limits).shared_by(self._settings.processes)
        limits = replace(self._settings.key_limits, **{name: getattr(own, name) for name in key.limits})
        return Caller(tenant_digest(key.tenant or key.name), f"key/{key.name}", limits)


def bears(headers: Headers, key: str) -> bool:
    """Whether a request has this one bearer key, in a time that tells nothing about it."""
    token = _bearer(headers)
    return token is not None and hmac.compare_digest(token.encode("utf-8", "replace"), key.encode())


def _token(headers: Headers) -> bytes:
    """What it says that it bears, or has in Anthropic's header; b"" where it says nothing of the kind. Looking up what
    an unknown key hashes to tells nothing, in however long it takes, about one that is known."""
    token = _bearer(headers)
    return (headers.get("x-api-key", "").strip() if token is None else token).encode("utf-8", "surrogateescape")


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _named(headers: Headers, tenant_header: str) -> str:
    values = headers.getlist(tenant_header) if tenant_header else []
    if len(values) > 1:  # the gateway's and the client's: which one is whose cannot be told
        raise RequestError(f"The header {tenant_header} must be sent once.", param=tenant_header)
    return values[0].strip() if values else ""
