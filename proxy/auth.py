"""Bearer API keys, and the tenant that follows from one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from epd_serve.errors import RequestError

DEFAULT_TENANT = "default"


class AuthenticationError(RequestError):
    """No key, or not one of ours."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


def tenant_of(authorization: str | None, api_keys: Sequence[str]) -> str:
    """The tenant of a request: a digest of its key, or `default` where no keys are configured.

    Raises:
        AuthenticationError: keys are configured and this is none of them.
    """
    if not api_keys:
        return DEFAULT_TENANT
    scheme, _, token = (authorization or "").partition(" ")
    given = token.strip().encode("utf-8", "replace")
    # Every key is compared, so that the time taken tells nothing about which one was close.
    matches = [hmac.compare_digest(given, key.encode()) for key in api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise AuthenticationError("Missing or invalid API key: send it as `Authorization: Bearer <key>`.")
    return hashlib.sha256(b"epd-serve/tenant/" + given).hexdigest()[:32]
