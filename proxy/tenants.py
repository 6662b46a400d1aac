"""Who asks, and how much of the proxy they may take: API keys, limits per key, fair shares of memory and of turns.

Bearer keys, and the tenant that follows from one, or from a header that a trusted gateway sets (`Callers`). A tenant is
a digest: it salts feature keys and vLLM's prefix cache, so that nobody can probe for what others sent.

What one key may ask at once and per minute (`KeyGate`). Bounds over all clients together are admission's.

What accounts share of a process: memory, and places to work (`FairShare`). One may hold as much as it leaves free for
the others. So one alone gets half, two that want all a third each, and whoever comes next always finds something (the
dynamic thresholds of Choudhury and Hahne, 1998, with a factor of one). The last piece is anybody's who has none.
Nothing has to be configured, and nobody has to be known beforehand. Where nothing tells accounts apart, the one that
there is may have everything. Bytes are counted before they are held, as they come, and given back when they go; never
by what was announced, since announcing is free. What is counted, and when, `docs/guides/overload.md` has as a formula
("Memory of the front door"). All of it is for one event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Self

from starlette.datastructures import Headers

from epd_serve.errors import OverloadedError, PayloadTooLargeError, RequestError
from proxy.config.keys import ApiKey, ApiKeys, digest, tenant_digest
from proxy.config.limits import KeyLimits
from proxy.config.settings import ProxySettings
from proxy.errors import BusyError

DEFAULT_TENANT = "default"
UNLIMITED = nullcontext()
MINUTE_S = 60.0


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


class KeyLimitError(OverloadedError):
    """This key has used up what it may: 429, and others are not concerned."""

    code = "rate_limit_exceeded"


class KeyGate:
    """Counts requests per account (`proxy.tenants.Caller`), whose limits may change. In one event loop; holds
    accounts only while they matter.

    Requests per minute are a bucket of that many, refilled evenly: short bursts pass, the average is bounded.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: Counter[str] = Counter()
        self._full_at: dict[tuple[str, str], float] = {}  # of what of an account, when its bucket is full again
        self._swept_at = 0.0

    def admitted(self, account: str, limits: KeyLimits) -> AbstractContextManager[None]:
        """Count one request of `account` while it lasts. Entering raises KeyLimitError (429) with the time to wait."""
        limited = limits.requests_in_flight or limits.requests_per_minute
        return self._counted(account, limits) if limited else UNLIMITED

    def take_tokens(self, account: str, limits: KeyLimits, tokens: float) -> None:
        """Count the tokens of one request of `account`. Raises KeyLimitError as `admitted` does; one that is larger
        than a minute's passes when nothing was taken lately."""
        if limits.tokens_per_minute:
            self._take(account, tokens, limits.tokens_per_minute, "tokens")

    @contextmanager
    def _counted(self, account: str, limits: KeyLimits) -> Iterator[None]:
        most, running = limits.requests_in_flight, self._in_flight[account]
        if most and running >= most:
            raise KeyLimitError(f"this key has {running} requests in progress, its limit is {most}; try again later")
        if limits.requests_per_minute:
            self._take(account, 1, limits.requests_per_minute, "requests")
        self._in_flight[account] += 1
        try:
            yield
        finally:
            self._in_flight[account] -= 1
            if not self._in_flight[account]:
                del self._in_flight[account]

    def _take(self, account: str, amount: float, per_minute: int, what: str) -> None:
        now, key = self._clock(), (account, what)
        if now > self._swept_at + MINUTE_S:
            self._swept_at = now
            self._full_at = {one: full_at for one, full_at in self._full_at.items() if full_at > now}
        full_at, took_s = max(self._full_at.get(key, now), now), MINUTE_S * amount / per_minute
        wait_s = full_at + min(took_s, MINUTE_S) - now - MINUTE_S
        if wait_s > 1e-6:
            raise KeyLimitError(
                f"this key has made its {per_minute} {what} per minute; try again later", retry_after_s=wait_s
            )
        self._full_at[key] = full_at + took_s


class FairShare:
    """A limit, and what is held of it by account. An account that holds nothing is not remembered.

    Attributes:
        limit: how much there is. held: by all accounts now.
    """

    def __init__(self, limit: int, *, apart: bool, what: str = "places", code: str = "busy") -> None:
        """
        Args:
            apart: accounts are told apart; otherwise all of `limit` is anybody's.
            what: is held, as a refusal names it. code: of the refusal where none is left.
        """
        self.limit = limit
        self.held = 0
        self._apart = apart
        self._what = what
        self._code = code
        self._held_by: defaultdict[str, int] = defaultdict(int)

    @property
    def most(self) -> int:
        """What one account can hold at best, while nobody else holds anything."""
        return max(self.limit // 2, 1) if self._apart else self.limit

    def held_by(self, account: str) -> int:
        return self._held_by.get(account, 0)

    def fits(self, account: str, amount: int) -> bool:
        """Whether an account may hold so much more now."""
        left = self.limit - self.held - amount
        return left >= 0 and (not self._apart or self.held_by(account) + amount <= max(left, 1))

    def take(self, account: str, amount: int) -> None:
        """Hold more.

        Raises:
            BusyError: 503, all accounts together have taken what there is. KeyLimitError: 429, the rest is kept for
            other accounts. Nothing was taken then.
        """
        if not self.fits(account, amount):
            if self.held + amount > self.limit:
                raise BusyError(
                    f"all of the {self.limit:,} {self._what} that there are for requests are taken; try again later",
                    code=self._code,
                )
            raise KeyLimitError(
                f"requests of this account in progress hold {self.held_by(account):,} {self._what}, which is its "
                "share; try again later",
                retry_after_s=2.0,
            )
        self.held += amount
        self._held_by[account] += amount

    def give_back(self, account: str, amount: int) -> None:
        self.held -= amount
        self._held_by[account] -= amount
        if not self._held_by[account]:
            del self._held_by[account]


class MemoryReservation:
    """The bytes that one request of `account` holds of a share, until the context that it is ends."""

    def __init__(self, share: FairShare, account: str) -> None:
        self._share = share
        self.account = account
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self.size_bytes)

    def take(self, more_bytes: int) -> None:
        """So many more are about to be held.

        Raises:
            PayloadTooLargeError: 413, the request could never be held. And what `FairShare.take` raises.
        """
        if self.size_bytes + more_bytes > self._share.most:
            raise PayloadTooLargeError(
                f"The request would take more than {self._share.most:,} bytes of this server's memory "
                "(memory.process_bytes), which no request may.",
                code="request_too_large",
            )
        self._share.take(self.account, more_bytes)
        self.size_bytes += more_bytes

    def give_back(self, less_bytes: int) -> None:
        """So many are held no more."""
        assert less_bytes <= self.size_bytes, "more is given back than was taken"
        self.size_bytes -= less_bytes
        self._share.give_back(self.account, less_bytes)

    def handed_over(self) -> MemoryReservation:
        """All of it, for what outlives the request. This one holds nothing then."""
        other = MemoryReservation(self._share, self.account)
        other.size_bytes, self.size_bytes = self.size_bytes, 0
        return other


class FairSemaphore:
    """So many may work at once; the next turn goes to the account that has fewest, of equals to the one that was served
    longest ago, and within an account to whoever came first.

    Args:
        places: at once. spare: an account has at most as many as are free, so that one whose work is slow cannot take
            every place.
    """

    def __init__(self, places: int, *, spare: bool = False) -> None:
        self._share = FairShare(places, apart=spare)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which accounts were served last

    @asynccontextmanager
    async def turn(self, account: str, *, within_s: float | None = None) -> AsyncIterator[None]:
        """One turn, for the time of the context. Raises TimeoutError after `within_s`; without it the caller ends the
        wait."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        self._hand_out()
        try:
            async with asyncio.timeout(within_s):
                await turn
            yield
        finally:
            if not turn.cancelled():  # it may have come at the very moment at which the wait ended
                self._share.give_back(account, 1)
            self._hand_out()

    def _hand_out(self) -> None:
        while waiting := [account for account in list(self._waiting) if self._is_next(account)]:
            account = min(waiting, key=self._share.held_by)
            self._share.take(account, 1)
            turns = self._waiting.pop(account)
            turns.popleft().set_result(None)
            if turns:
                self._waiting[account] = turns

    def _is_next(self, account: str) -> bool:
        """Whether somebody of it waits, and may have a turn."""
        turns = self._waiting[account]
        while turns and turns[0].done():  # given up
            turns.popleft()
        if not turns:
            del self._waiting[account]
        return bool(turns) and self._share.fits(account, 1)
