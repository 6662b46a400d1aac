"""The certificate of the clients' port: refused where it is none, replaced when it changes, kept when broken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import pytest

from epd_serve.errors import ConfigError
from proxy.server.shared_listener import SharedListener
from proxy.server.tls import Certificate
from tests.certificates import certificate
from tests.waiting import PATIENCE_S


def names(context: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Who a server with `context` is to a client."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = context.wrap_bio(to_server, to_client, server_side=True)
    asking = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for one in (asking, serving, asking):
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
    found = asking.getpeercert()
    assert found is not None
    return str(dict(pair for pairs in found["subject"] for pair in pairs)["commonName"])  # type: ignore[misc]


def trusting(cert_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert_file)


def test_new_files_are_for_new_connections_and_broken_ones_for_none(tmp_path: Path) -> None:
    files = certificate(tmp_path, "first")
    served = Certificate(*files)
    first = served.context
    served.look()
    assert served.context is first and names(first, trusting(files[0])) == "first"
    certificate(tmp_path, "second")
    served.look()
    assert served.context is not first and names(served.context, trusting(files[0])) == "second"
    second = served.context
    for content in (None, "no certificate"):
        Path(files[0]).unlink(missing_ok=True)
        if content is not None:
            Path(files[0]).write_text(content)
        served.look()
        assert served.context is second
    certificate(tmp_path, "third")
    served.look()
    assert names(served.context, trusting(files[0])) == "third"


@pytest.mark.parametrize("broken", ["absent", "another key", "text"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, broken: str) -> None:
    cert_file, key_file = certificate(tmp_path)
    if broken == "absent":
        cert_file = str(tmp_path / "none.pem")
    elif broken == "text":
        Path(cert_file).write_text("text")
    else:
        other = tmp_path / "other"
        other.mkdir()
        key_file = certificate(other)[1]
    with pytest.raises(ConfigError, match=r"\.pem") as refused:
        Certificate(cert_file, key_file)
    assert refused.value.param == "--tls-cert-file"


async def test_who_talks_no_tls_is_let_go_and_others_are_served(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    made: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    class Greets(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set_result(transport.get_extra_info("sslcontext"))
            transport.write(b"hello")  # type: ignore[attr-defined]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        listener = SharedListener(listening, lambda: None, Certificate(*files))
        listener.start(Greets, [])
        async with asyncio.timeout(PATIENCE_S):
            plain, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in await plain.read()
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(files[0]))
            assert await reader.readexactly(5) == b"hello" and await made is not None
            writer.close()
        listener.stop()
