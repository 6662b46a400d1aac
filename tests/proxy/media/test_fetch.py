"""Fetching a client's URL reaches public addresses only, whatever names, redirects or encodings say."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_serve.errors import PayloadTooLargeError, RequestError
from proxy.config.limits import MediaLimits
from proxy.media.fetch import UrlFetcher, is_public
from tests.certificates import certificate

PUBLIC = "93.184.216.34"
FREE: Any = {"account": "a", "grow": lambda _: None}
Handler = Callable[[httpx.Request], httpx.Response]


def fetcher(
    handler: Handler,
    names: dict[str, Sequence[str]] | None = None,
    *,
    resolved: list[str] | None = None,
    **limits: object,
) -> UrlFetcher:
    known = names or {"example.com": [PUBLIC]}

    async def resolver(host: str, port: int) -> Sequence[str]:
        if resolved is not None:
            resolved.append(host)
        if host not in known:
            raise OSError("no such host")
        return known[host]

    chosen = MediaLimits(**{"fetch_timeout_s": 0.5, **limits})  # type: ignore[arg-type]
    return UrlFetcher(chosen, transport=httpx.MockTransport(handler), resolver=resolver)


def ok(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(b"image"))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True), ("8.8.8.8", True), ("2606:4700::1111", True),
        ("127.0.0.1", False), ("127.8.8.8", False), ("0.0.0.0", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False),
        ("240.0.0.1", False), ("255.255.255.255", False), ("192.0.2.1", False), ("198.18.0.1", False),
        ("::1", False), ("::", False), ("fe80::1", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("fec0::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True), ("64:ff9b::7f00:1", False), ("64:ff9b::a9fe:a9fe", False), ("2002:7f00:1::", False),
        ("2002:a00:1::", False), ("2001:db8::1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


async def test_the_connection_goes_to_the_address_that_was_judged_under_the_original_name() -> None:
    sent: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return ok(request)

    assert await fetcher(handler).fetch("https://example.com:8443/a?b=c#d", param="p", **FREE) == b"image"
    [request] = sent
    assert request.url == f"https://{PUBLIC}:8443/a?b=c"
    assert request.headers["host"] == "example.com:8443"
    assert request.extensions["sni_hostname"] == "example.com"


@pytest.mark.parametrize("addresses", [["10.0.0.1"], [PUBLIC, "127.0.0.1"], ["::ffff:192.168.0.1"]])
async def test_a_name_with_any_private_address_is_refused_before_a_connection(addresses: list[str]) -> None:
    def never(_: httpx.Request) -> httpx.Response:
        raise AssertionError("connected")

    with pytest.raises(RequestError, match="public") as refused:
        await fetcher(never, {"inner": addresses}).fetch("http://inner/x", param="p", **FREE)
    assert refused.value.param == "p" and refused.value.status == 400
    assert not any(address in refused.value.message for address in addresses)


async def test_private_addresses_may_be_allowed() -> None:
    allowed = fetcher(ok, {"inner": ["10.0.0.1"]}, allow_private_addresses=True)
    assert await allowed.fetch("http://inner/x", param="p", **FREE) == b"image"


async def test_every_redirect_is_judged_anew() -> None:
    hops = {
        "/a": httpx.Response(302, headers={"location": "/b"}),
        "/b": httpx.Response(301, headers={"location": "http://inner/secret"}),
    }
    resolved: list[str] = []
    names = {"example.com": [PUBLIC], "inner": ["169.254.169.254"]}
    with pytest.raises(RequestError, match="'inner'"):
        await fetcher(lambda request: hops[request.url.path], names, resolved=resolved).fetch(
            "http://example.com/a", param="p", **FREE
        )
    assert resolved == ["example.com", "example.com", "inner"]


async def test_a_certificate_counts_for_its_name_and_for_no_other_at_the_same_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert_file, key_file = certificate(tmp_path, "media.example")
    monkeypatch.setattr("certifi.where", lambda: cert_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():  # for as long as the connection is kept
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nimage")
        writer.close()

    async def resolver(_: str, __: int) -> Sequence[str]:
        return ["127.0.0.1"]

    one = UrlFetcher(MediaLimits(allow_private_addresses=True), resolver=resolver)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await one.fetch(f"https://media.example:{port}/a", param="p", **FREE) == b"image"
        with pytest.raises(RequestError, match="ConnectError"):
            await one.fetch(f"https://other.example:{port}/a", param="p", **FREE)
        assert await one.fetch(f"https://media.example:{port}/a", param="p", **FREE) == b"image"
    await one.aclose()


async def test_nothing_of_one_fetch_goes_with_the_next_one() -> None:
    sent: list[httpx.Request] = []

    def sets_a_cookie(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        if request.url.path == "/first":
            return httpx.Response(302, headers={"location": "/second", "set-cookie": "session=secret; Path=/"})
        return httpx.Response(200, headers={"set-cookie": "session=secret; Path=/"}, stream=httpx.ByteStream(b"image"))

    one = fetcher(sets_a_cookie, {"example.com": [PUBLIC], "another.example": [PUBLIC]})
    for url in ("http://example.com/first", "http://example.com/third", "http://another.example/"):
        assert await one.fetch(url, param="p", **FREE) == b"image"
    assert [request.headers["host"] for request in sent] == ["example.com"] * 3 + ["another.example"]
    assert not any("cookie" in request.headers or "referer" in request.headers for request in sent)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://example.com/", "http://u:p@example.com/"])
async def test_a_redirect_cannot_leave_http(location: str) -> None:
    with pytest.raises(RequestError):
        await fetcher(lambda _: httpx.Response(302, headers={"location": location})).fetch(
            "http://example.com/", param="p", **FREE
        )


async def test_redirects_are_bounded() -> None:
    loop = httpx.Response(302, headers={"location": "http://example.com/again"})
    with pytest.raises(RequestError, match="redirects"):
        await fetcher(lambda _: loop).fetch("http://example.com/", param="p", **FREE)


async def test_size_is_bounded_with_and_without_an_announced_length() -> None:
    async def endless():  # type: ignore[no-untyped-def]
        while True:
            yield b"x" * 1000

    for response in (httpx.Response(200, content=b"x" * 5001), httpx.Response(200, content=endless())):
        with pytest.raises(PayloadTooLargeError) as refused:
            await fetcher(lambda _, response=response: response, max_bytes=5000).fetch(  # type: ignore[misc]
                "http://example.com/", param="p", **FREE
            )
        assert refused.value.status == 413 and refused.value.param == "p"


async def test_compressed_answers_are_refused() -> None:
    bomb = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"x"))
    with pytest.raises(RequestError, match="compressed"):
        await fetcher(lambda _: bomb).fetch("http://example.com/", param="p", **FREE)


async def test_a_slow_server_meets_the_deadline() -> None:
    async def slow():  # type: ignore[no-untyped-def]
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(RequestError, match=r"0\.5 s"):
        await fetcher(lambda _: httpx.Response(200, content=slow())).fetch("http://example.com/", param="p", **FREE)


@pytest.mark.parametrize("status", [204, 206, 401, 404, 500])
async def test_only_200_is_an_answer(status: int) -> None:
    with pytest.raises(RequestError, match=str(status)):
        await fetcher(lambda _: httpx.Response(status)).fetch("http://example.com/", param="p", **FREE)


async def test_an_unreachable_host_is_a_400_that_names_the_item() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(RequestError, match=r"^item: cannot be fetched"):
        await fetcher(refuse).fetch("http://example.com/", param="item", **FREE)
    with pytest.raises(RequestError, match="cannot be resolved"):
        await fetcher(ok).fetch("http://unknown.example/", param="item", **FREE)


async def test_the_next_address_is_tried_when_one_refuses() -> None:
    def first_refuses(request: httpx.Request) -> httpx.Response:
        if request.url.host == PUBLIC:
            raise httpx.ConnectError("refused", request=request)
        return ok(request)

    both = fetcher(first_refuses, {"example.com": [PUBLIC, "8.8.8.8"]})
    assert await both.fetch("http://example.com/", param="p", **FREE) == b"image"


@pytest.mark.parametrize("host", ["0x7f.1", "2130706433", "127.1", "localhost", "[::1]", "[::ffff:7f00:1]"])
async def test_odd_spellings_of_loopback_are_refused_by_the_real_resolver(host: str) -> None:
    real = UrlFetcher(MediaLimits(), transport=httpx.MockTransport(ok))
    with pytest.raises(RequestError, match=r"public|resolved|valid URL"):
        await real.fetch(f"http://{host}/", param="p", **FREE)
