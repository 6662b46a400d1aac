"""A device with round numbers and requests made by hand."""

from __future__ import annotations

from bench.clients.sender import Run
from bench.workloads.requests import ImageRef, RequestSpec
from epd_serve.layout_parser import parse
from tests.soak.emulation.deployment import emulate
from tests.soak.emulation.device import StageDevice

DEVICE = StageDevice(
    name="round numbers",
    encode_s_per_token=0.001,
    prefill_s_per_token=0.002,
    decode_s=0.01,
    decode_s_per_sequence=0.001,
    front_s=0.5,
    handover_s=0.04,
    handover_s_per_token=0.0,
    kv_exposed_s=0.02,
    encode_slows_prefill=1.5,
    encode_slows_decode=1.5,
    prefill_slows_decode=1.5,
    max_running=16,
    step_tokens=2048,
    kv_tokens=100_000,
    block_tokens=16,
)
PICTURE = 100  # tokens of 280x280 pixels


def request(number: int, at_s: float, *, pictures: int = 1, text: int = 10, tokens: int = 4) -> RequestSpec:
    drawn = tuple(ImageRef(280, 280, number * 100 + one) for one in range(pictures))
    return RequestSpec(f"r{number}", "", drawn, tokens, text, arrival_s=at_s)


def served(layout: str, *requests: RequestSpec, device: StageDevice = DEVICE) -> Run:
    return emulate(parse(layout), device, requests, "1 rps")
