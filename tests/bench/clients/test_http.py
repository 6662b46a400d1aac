"""Addresses of servers as people write them."""

from __future__ import annotations

import pytest

from bench.clients.http import Endpoint
from epd_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host:80"),
        ("https://api.example/openai/v1", "https://api.example:443/openai"),
        ("http://[::1]:9/", "http://[::1]:9"),
    ],
)
def test_an_address_is_taken_with_or_without_its_v1(url, said):
    assert str(Endpoint.of(url)) == said


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "http://u@x"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Endpoint.of(url)
