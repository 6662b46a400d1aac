"""Limits on what media a client may send: length, frames, schemes, hosts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from epd_serve.errors import ConfigError
from proxy.config.limits import DomainRules, MediaLimits
from tests.proxy.fakes import Cluster, cluster, data_url, image_file, settings, text_body
from tests.proxy.media import clips

CHAT = "/v1/chat/completions"
LIMITS = MediaLimits(max_video_s=10.0, max_audio_s=5.0, max_pixels=10_000)


def part(**fields: Any) -> dict[str, Any]:
    return text_body(messages=[{"role": "user", "content": [fields]}])


def video(data: bytes) -> dict[str, Any]:
    return part(type="video_url", video_url={"url": data_url(data, "video/mp4")})


def audio(data: bytes) -> dict[str, Any]:
    return part(type="input_audio", input_audio={"data": base64.b64encode(data).decode(), "format": "wav"})


async def refusal(c: Cluster, body: dict[str, Any]) -> tuple[int, str]:
    response = await c.client.post(CHAT, json=body)
    return response.status_code, response.json().get("error", {}).get("code", "")


async def test_clips_within_the_limits_pass_and_longer_or_larger_ones_reach_no_stage() -> None:
    async with cluster("EPD0", config=settings(media=LIMITS)) as c:
        assert await refusal(c, video(clips.mp4(10.0))) == (200, "")
        assert await refusal(c, audio(clips.wav(5.0))) == (200, "")
        assert await refusal(c, video(b"of no known container")) == (200, "")
        calls_before = len(c["EPD0"].calls)
        assert await refusal(c, video(clips.mp4(10.1))) == (400, "media_too_long")
        assert await refusal(c, video(clips.webm(11_000.0))) == (400, "media_too_long")
        assert await refusal(c, video(clips.mp4(1.0, width=101, height=100))) == (400, "too_many_pixels")
        assert await refusal(c, audio(clips.wav(6.0))) == (400, "media_too_long")
        endless_number = clips.webm(1000.0, width=1 << 16_000, width_bytes=2001)
        assert await refusal(c, video(endless_number)) == (400, "too_many_pixels")
        assert len(c["EPD0"].calls) == calls_before


async def test_schemes_that_the_operator_took_away_are_refused() -> None:
    async with cluster("EPD0", config=settings(media=replace(LIMITS, schemes=("https",)))) as c:
        for url in (data_url(image_file()), "http://example.com/x.png", "file:///x.png"):
            body = part(type="image_url", image_url={"url": url})
            assert await refusal(c, body) == (400, "media_scheme")


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("cdn.example.com", True), ("CDN.example.com.", True), ("a.b.pics.org", True), ("xn--bcher-kva.de", True),
        ("example.com", False), ("evil-cdn.example.com", False), ("cdn.example.com.evil.org", False),
        ("pics.org", False), ("xpics.org", False), ("bad.pics.org", False), ("93.184.216.34", False),
    ],
)  # fmt: skip
def test_which_hosts_are_admitted(host: str, admitted: bool) -> None:
    rules = DomainRules(["cdn.example.com", "*.pics.org", "bücher.de"], ["bad.pics.org"])
    assert rules.admit(host) is admitted


def test_without_allowed_hosts_all_but_the_denied_are() -> None:
    rules = DomainRules([], ["*.internal", "example.com"])
    assert rules.admit("example.org") and not rules.admit("a.internal") and not rules.admit("example.com.")


@pytest.mark.parametrize("domain", ["", "*", "*.", "http://example.com", "a b", "a.*.com", "example.com:80"])
def test_what_is_no_host_name_is_refused_at_the_start(domain: str) -> None:
    with pytest.raises(ConfigError, match="no host name"):
        MediaLimits(allowed_domains=(domain,))


async def test_a_redirect_does_not_lead_out_of_the_allowed_hosts() -> None:
    hosts: list[str] = []

    async def resolver(host: str, port: int) -> Sequence[str]:
        return ["93.184.216.34"]

    def handler(request: httpx.Request) -> httpx.Response:
        hosts.append(request.headers["host"])
        return httpx.Response(302, headers={"location": "https://elsewhere.org/x.png"})

    limits = replace(LIMITS, allowed_domains=("cdn.example.com",))
    transport = httpx.MockTransport(handler)
    async with cluster("EPD0", config=settings(media=limits), media_transport=transport, resolver=resolver) as c:
        body = part(type="image_url", image_url={"url": "https://cdn.example.com/x.png"})
        assert await refusal(c, body) == (400, "media_domain_refused")
        assert hosts == ["cdn.example.com"]
        body = part(type="image_url", image_url={"url": "https://93.184.216.34/x.png"})
        assert await refusal(c, body) == (400, "media_domain_refused")


@pytest.mark.parametrize("changes", [{"schemes": ("ftp",)}, {"max_video_s": 0}, {"max_audio_s": -1.0}])
def test_limits_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MediaLimits(**changes)


@pytest.mark.parametrize(
    "options", [{"num_frames": -1}, {"num_frames": 257}, {"num_frames": True}, {"max_frames": 1000}]
)
async def test_a_request_cannot_have_every_frame_of_a_video_decoded(options: dict[str, Any]) -> None:
    async with cluster("EPD0", config=settings(trust_request_mm_kwargs=True)) as c:
        body = video(clips.mp4(1.0)) | {"media_io_kwargs": {"video": options}}
        assert await refusal(c, body) == (400, "too_many_frames")
        assert await refusal(c, body | {"media_io_kwargs": {"video": {"num_frames": 256}}}) == (200, "")


async def test_frames_times_pixels_are_bounded() -> None:
    limits = MediaLimits(max_video_pixels=32 * 10_000)
    async with cluster("EPD0", config=settings(media=limits)) as c:
        assert await refusal(c, video(clips.mp4(1.0, width=100, height=100))) == (200, "")
        assert await refusal(c, video(clips.mp4(1.0, width=101, height=100))) == (400, "too_many_pixels")
