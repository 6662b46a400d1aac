"""Fetch a client's http(s) URL without becoming the client's tool inside our network (SSRF).

The host is resolved here, every address is judged, and the connection goes to the very address that was judged:
the URL's host is replaced by it, the name travels as Host header and TLS server name. Each redirect starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from epd_serve.errors import RequestError
from proxy.config.limits import DomainRules, MediaLimits
from proxy.errors import BusyError, media_refused, media_too_large
from proxy.tenants import FairSemaphore

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
Grow = Callable[[int], None]
NAT64 = ipaddress.ip_network("64:ff9b::/96")
LOOKUPS = 128
"""Names that are resolved at a time. One whose fetch was given up goes on until the system gives it up, and must hold
up no other."""
_lookups = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="lookup")


async def resolve(host: str, port: int) -> Sequence[str]:
    """Addresses of `host`, as the system resolves it (which also unfolds forms like 0x7f.1)."""

    def lookup() -> Sequence[str]:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

    return await asyncio.get_running_loop().run_in_executor(_lookups, lookup)


def is_public(address: str) -> bool:
    """True for a globally routable unicast address, also when an IPv4 address hides inside an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in NAT64:
            embedded.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.is_site_local or any(inner is not None and not is_public(str(inner)) for inner in embedded):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not ip.is_unspecified


class UrlFetcher:
    """One process's fetcher. `transport` and `resolver` are the seams for tests."""

    def __init__(
        self,
        limits: MediaLimits,
        *,
        apart: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        """`apart`: accounts are told apart, so that none of them takes every slot."""
        self._limits = limits
        self._domains = DomainRules(limits.allowed_domains, limits.denied_domains)
        self._resolver = resolver
        # A transport without a client around it, which would follow redirects unjudged and keep cookies for the next.
        # No keep-alive: a pooled TLS connection was verified for one name and must not serve another on that address.
        self._transport = transport or httpx.AsyncHTTPTransport(
            trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._turns = FairSemaphore(limits.max_parallel_fetches, spare=apart)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def fetch(self, url: str, *, param: str, account: str, grow: Grow) -> bytearray:
        """The bytes behind `url`.

        Args:
            grow: told of every further bytes before they are kept, and may refuse them.

        Raises:
            RequestError: 400. PayloadTooLargeError: 413; both name `param`. BusyError: 503, its turn did not come in
            time. What `grow` raises.
        """
        limits = self._limits
        try:
            async with self._turns.turn(account, within_s=limits.fetch_wait_s):
                return await self._fetch(url, param, grow)
        except TimeoutError:
            raise BusyError(
                f"{param}: this server fetches as many media as it may; try again later",
                param=param,
                code="fetches_full",
            ) from None

    async def _fetch(self, url: str, param: str, grow: Grow) -> bytearray:
        timeout_s = self._limits.fetch_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(url, param, grow)
        except TimeoutError:
            raise _unreachable(param, f"no complete answer within {timeout_s:g} s") from None
        except (httpx.InvalidURL, UnicodeError):  # what it says quotes the URL, which may hold a secret
            raise _unreachable(param, "not a valid URL") from None
        except httpx.HTTPError as error:
            raise _unreachable(param, f"cannot be fetched ({type(error).__name__})") from error

    async def _follow(self, url: str, param: str, grow: Grow) -> bytearray:
        target = httpx.URL(url)
        for _ in range(self._limits.max_redirects + 1):
            *first, last = await self._judged_addresses(target, param)
            for address in first:
                with contextlib.suppress(httpx.ConnectError):
                    answer = await self._get(address, target, param, grow)
                    break
            else:
                answer = await self._get(last, target, param, grow)
            if isinstance(answer, bytearray):
                return answer
            target = target.join(answer)
        raise _unreachable(param, f"more than {self._limits.max_redirects} redirects")

    async def _judged_addresses(self, url: httpx.URL, param: str) -> Sequence[str]:
        """At least one address of the host of `url`, all of which may be connected to."""
        if url.scheme not in ("http", "https") or not url.host:
            raise _unreachable(param, f"scheme {url.scheme!r} is not supported")
        if url.userinfo:
            raise _unreachable(param, "credentials in URLs are not supported")
        host = url.raw_host.decode("ascii")
        if url.scheme not in self._limits.schemes or not self._domains.admit(host):
            what = f"this server does not fetch from {url.scheme}://{host}"
            raise media_refused(param, what, "media_domain_refused")
        port = url.port or (443 if url.scheme == "https" else 80)
        if not 0 < port < 65536:
            raise _unreachable(param, f"there is no port {port}")
        try:
            addresses = list(dict.fromkeys(await self._resolver(url.host, port)))
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise _unreachable(param, f"host {url.host!r} cannot be resolved")
        if not self._limits.allow_private_addresses and not all(map(is_public, addresses)):
            what = f"host {url.host!r} is not a public address, and this server fetches from public ones only"
            raise media_refused(param, what, "media_address_refused")
        return addresses

    async def _get(self, address: str, url: httpx.URL, param: str, grow: Grow) -> bytearray | str:
        """The body at `url`, or the location it redirects to."""
        request = httpx.Request(
            "GET",
            url.copy_with(host=address, fragment=None),
            headers={
                "host": url.netloc.decode("ascii"),
                "accept": "*/*",
                "accept-encoding": "identity",
                "user-agent": "epd-serve",
            },
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        response = await self._transport.handle_async_request(request)
        try:
            headers, limit = response.headers, self._limits.max_bytes
            if response.is_redirect and "location" in headers:
                return headers["location"]
            if response.status_code != 200:
                raise _unreachable(param, f"the server answered {response.status_code}")
            if headers.get("content-encoding", "identity") != "identity":
                raise _unreachable(param, "the server sent a compressed answer that was not asked for")
            announced = headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > limit:
                raise media_too_large(param, limit)
            received = bytearray()
            async for chunk in response.aiter_raw():
                if len(received) + len(chunk) > limit:
                    raise media_too_large(param, limit)
                grow(len(chunk))
                received += chunk
            return received
        finally:
            await response.aclose()


def _unreachable(param: str, what: str) -> RequestError:
    return media_refused(param, what, "media_unreachable")
