"""What makes a process a member of a deployment on several hosts: a folder on each of them, or a mounted Secret.

    tls.crt, tls.key    certificate, with its chain, and key, as in a Secret of type kubernetes.io/tls
    ca.crt              whom the certificates of others have to be signed by; without it tls.crt itself
    token               one word that all of them show each other

A certificate counts for the name `epd-serve-node`, whatever the address: hosts and pods come and go.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ssl
from pathlib import Path

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_serve.errors import ConfigError
from epd_serve.key_files import derived_key, read_key, read_secret
from proxy.server.tls import Certificate

NAME = "epd-serve-node"
OPEN = ("/health", "/ready")
"""Paths that are answered to everybody, without content."""

MAKE = (
    "make them once, in a folder of the same name on every host: openssl req -x509 -newkey ec -pkeyopt "
    f"ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN={NAME} -addext subjectAltName=DNS:{NAME} "
    "-keyout tls.key -out tls.crt; openssl rand -hex 32 > token; chmod 600 tls.key token"
)


class NodeSecrets:
    """Args:
        folder: of the files.
        flag: that names it, for what is said.

    Attributes:
        token: that the members show each other.
        certificate: of this one, which is read again when its files change.
        authority: the file whose certificates are trusted. context: trusts those of the others.

    Raises:
        ConfigError: a file is missing, is open to everybody, or cannot be used.
    """

    def __init__(self, folder: str, flag: str) -> None:
        if not folder:
            raise ConfigError(
                f"several hosts speak over TLS with a token: give the folder by {flag}; {MAKE}", param=flag
            )
        self.folder = path = Path(folder)
        try:
            read_secret(str(path / "tls.key"), flag, fix=MAKE)
            self.token = read_key(str(path / "token"), flag)
            self.certificate = Certificate(str(path / "tls.crt"), str(path / "tls.key"))
            self.authority = path / ("ca.crt" if (path / "ca.crt").exists() else "tls.crt")
            self.context = ssl.create_default_context(cafile=self.authority)
        except (ConfigError, OSError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"{flag} {folder}: {error}", param=flag) from error

    def check(self) -> None:
        """Raises ConfigError: who has the same files does not take this one for a member."""
        asked, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            self.context.wrap_bio(answered, asked, server_hostname=NAME),
            self.certificate.context.wrap_bio(asked, answered, server_side=True),
        )
        try:
            for end in ends * 3:
                with contextlib.suppress(ssl.SSLWantReadError):  # the other one is to speak
                    end.do_handshake()
        except ssl.SSLError as error:
            raise ConfigError(f"{self.folder / 'tls.crt'} is no certificate of {NAME}: {error.reason}") from error

    def marks(self) -> dict[str, str]:
        """What has to be the same on all hosts, by file: nothing that it could be guessed from."""
        trusted = self.context.get_ca_certs(binary_form=True)
        return {
            "token": derived_key(self.token, "epd-serve/mark/1").hex()[:8],
            self.authority.name: hashlib.sha256(b"".join(sorted(trusted))).hexdigest()[:8],
        }

    def show(self, request: httpx.Request) -> None:
        """Have a request show the token, and want a member at the other end."""
        request.headers["authorization"] = f"Bearer {self.token}"
        request.extensions = {**request.extensions, "sni_hostname": NAME}

    async def _show(self, request: httpx.Request) -> None:
        self.show(request)

    def client(self, address: str, timeout_s: float) -> httpx.AsyncClient:
        """Asks the member at `HOST:PORT`."""
        hooks = {"request": [self._show]}
        url = f"https://{address}"
        return httpx.AsyncClient(
            verify=self.context, base_url=url, timeout=timeout_s, event_hooks=hooks, trust_env=False
        )

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Answers who shows the token, and all who ask for one of the paths that are open."""
        wanted = f"Bearer {self.token}".encode()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan" or scope["path"] in OPEN:
                return await app(scope, receive, send)
            if hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), wanted):
                return await app(scope, receive, send)
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        return answer
