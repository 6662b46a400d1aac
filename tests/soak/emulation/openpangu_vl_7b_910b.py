"""openPangu-7B-VL on one NPU of an Atlas 800I A2 (Ascend 910B, 64 GB): every constant with its source.

Nothing here was measured by us, and nothing was fitted to EPD-Serve's Table 5, whose ordering an emulation with these
constants is held against (docs/measuring/emulation.md). They are solved from other numbers of that paper (Tables 1 to
4, §4.1, §4.3), from the model card and from vLLM's defaults. Table 5 was known to whoever chose how to read those; so
what else a source could mean is in `READINGS`, and goes into the sensitivity.

The sources do not agree with each other everywhere:
- Table 2's time per output token (38 to 44 ms at 2 and 3 requests a second) is above the 30 ms that §4.4 says 85 % of
  the requests keep at 4 requests a second and device. Table 2 gives two points of a line and is taken; the other is a
  reading.
- Table 4's prefill, if its 16 prompts were all of it, would be 0.40 ms a token: one P would be full at 3 requests a
  second, where Table 2 has a TTFT of 0.65 s. See PREFILL_S_PER_TOKEN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import linear_regression

from bench.micro.ep.transfers import TABLE_3
from tests.soak.emulation.device import StageDevice
from tests.soak.emulation.printed import OUTPUT_TOKENS, TABLE_2, TABLE_2_RATES, TABLE_4_GROUPED

# --- the workload -------------------------------------------------------------------------------------------------
# Moments of `sharegpt4o-like` (bench/workloads/profiles.py: EPD-Serve §4.1 prints the averages), 16 seeds of 512
# requests, 28x28 pixels to a token (Table 3). tests/soak/emulation/test_device.py holds them to the workload.
ITEM_TOKENS, ITEM_TOKENS_SQUARED = 789.4, 1.281e6
PROMPT_TOKENS, PROMPT_TOKENS_SQUARED = 799.0, 1.296e6

# --- prefill ------------------------------------------------------------------------------------------------------
# openPangu-Embedded-7B-V1.1, model card: 34 layers, 8 KV heads of 128; K and V of 2 bytes: 139 264 bytes a token.
KV_BYTES_PER_TOKEN = 34 * 8 * 128 * 2 * 2
# Table 4, optimised, 1024 tokens: 715.53 ms · 12.58 GB/s = 9.00 GB of KV went over while 6610.57 ms were prefilled.
# That is the KV of 64 635 tokens, 63 prompts of 1024: "concurrency of 16" is how many ran at once, not how many ran.
_TABLE_4 = TABLE_4_GROUPED[1024]
_TABLE_4_TOKENS = _TABLE_4.kv_ms / 1e3 * _TABLE_4.bandwidth_gb_per_s * 1e9 / KV_BYTES_PER_TOKEN
PREFILL_S_PER_TOKEN = _TABLE_4.prefill_ms / 1e3 / _TABLE_4_TOKENS  # 0.1023 ms
# Check: 2 · 7e9 operations a token (Table 1) in 0.1023 ms are 137 TFLOPS, 44 % of the 313 TFLOPS (FP16) of a 910B3.

# --- encode -------------------------------------------------------------------------------------------------------
# Table 1: 0.7 B parameters against 7 B. A token of the language model is 28x28 pixels, four patches of 14x14, so the
# tower does 4 · 0.7 / 7 of the operations per token; at the same operations a second (its attention is left out):
ENCODE_S_PER_TOKEN = PREFILL_S_PER_TOKEN * 4 * 0.7 / 7  # 0.0409 ms
# Check: at the model's release (January 2026) its makers gave 160 ms for tower and first token of a 720p picture on an
# Atlas 800T A2. Table 3: 1196 tokens, so 1196 · (0.1023 + 0.0409 ms) = 171 ms here.
FIRST_TOKEN_720P_S = 0.160

# --- decode -------------------------------------------------------------------------------------------------------
# Table 2: E-P-D at 2 and 3 requests a second. §4.1: "the per-NPU request rate is normalized by the number of NPUs", so
# 6 and 9 requests a second on three NPUs. (At 2 and 3 in all, the TTFT could not grow by 169 ms from one to the other:
# P would be busy for a quarter of the time.) TPOT is the mean of the four rows, of which none changes D.
DEVICES_OF_TABLE_2 = 3
TPOT_S = {rate: sum(row.tpot_ms[at] for row in TABLE_2.values()) / 4e3 for at, rate in enumerate(TABLE_2_RATES)}
# By Little's law D decodes rate · 64 · TPOT requests at once: 14.9 and 24.7. Through both points a line:
_BATCH = {rate: rate * DEVICES_OF_TABLE_2 * OUTPUT_TOKENS * tpot_s for rate, tpot_s in TPOT_S.items()}
DECODE_S_PER_SEQUENCE = (TPOT_S[3] - TPOT_S[2]) / (_BATCH[3] - _BATCH[2])  # 0.42 ms
DECODE_S = TPOT_S[2] - DECODE_S_PER_SEQUENCE * _BATCH[2]  # 32.6 ms
# Check: 7.7 B parameters of 2 bytes at the 1.6 TB/s of a 910B are 9.6 ms: 30 % of that bandwidth.

# --- between stages -----------------------------------------------------------------------------------------------
# Table 3: scheduling latency by tokens, least squares through the five sizes below 4K, at all of which the transfer is
# shorter (4 ms + 28 µs a token).
_BELOW_4K = [row for row in TABLE_3 if row.picture != "4k"]
_TOKENS = [row.tokens for row in _BELOW_4K]
_SCHEDULING = linear_regression(_TOKENS, [row.scheduling_ms / 1e3 for row in _BELOW_4K])  # 25 ms + 47 µs a token
KV_EXPOSED_S = _TABLE_4.exposed_ms / 1e3  # Table 4, optimised, 1024 tokens: 8.76 ms

# --- before the stages --------------------------------------------------------------------------------------------
# Not printed. It is what is left of Table 2's TTFT (EPD-Serve, 2 requests a second and NPU) when the rest is taken off:
# encode, handover, prefill, exposed KV, the waiting for E and for P (Pollaczek and Khinchine: Poisson arrivals, one
# server, service times as the pictures' sizes) and D's first token, which waits for half a step and takes one. The row
# at 3 requests a second is then a prediction; docs/measuring/emulation.md has how well it holds.
TTFT_S = {rate: TABLE_2["both"].ttft_ms[at] / 1e3 for at, rate in enumerate(TABLE_2_RATES)}


def _waiting_s(rate: float, s_per_token: float, tokens: float, tokens_squared: float) -> float:
    return rate * s_per_token**2 * tokens_squared / (2 * (1 - rate * s_per_token * tokens))


def ttft_without_front_s(rate: int) -> float:
    """Of E-P-D at `rate` requests a second and NPU, by the constants above."""
    every_s = rate * DEVICES_OF_TABLE_2
    encode = ENCODE_S_PER_TOKEN * ITEM_TOKENS + _waiting_s(
        every_s, ENCODE_S_PER_TOKEN, ITEM_TOKENS, ITEM_TOKENS_SQUARED
    )
    prefill = PREFILL_S_PER_TOKEN * PROMPT_TOKENS + _waiting_s(
        every_s, PREFILL_S_PER_TOKEN, PROMPT_TOKENS, PROMPT_TOKENS_SQUARED
    )
    handover = _SCHEDULING.intercept + _SCHEDULING.slope * ITEM_TOKENS
    return encode + handover + prefill + KV_EXPOSED_S + 1.5 * TPOT_S[rate]


FRONT_S = TTFT_S[2] - ttft_without_front_s(2)  # 0.15 s

# --- side by side on one device -----------------------------------------------------------------------------------
# §4.3: at 12 requests a second and NPU, where both are full, (E-PD) serves 12.87 to 14.88 % more than TP1. A request
# takes TP1 e + p + d of its device (d: 63 steps of a full batch, shared by its members). In (E-PD) E works on the
# next one meanwhile; each slows the other s-fold while both work, so PD, which is never idle, takes p + d + e · (s-1):
#   (e + p + d) / (p + d + e · (s - 1)) = 1.139  ⟹  s = 1.44
# Fig. 6 says that alike operators disturb each other more than unlike ones, without a number in the text: one equation
# for s, so one s for all pairs. That unlike ones do not disturb each other at all is a reading.
GAIN = 1 + (12.87 + 14.88) / 200
MAX_RUNNING = 256  # vLLM 0.11 with an API server on a device below 70 GiB: --max-num-seqs
_E, _P = ENCODE_S_PER_TOKEN * ITEM_TOKENS, PREFILL_S_PER_TOKEN * PROMPT_TOKENS
_D = (OUTPUT_TOKENS - 1) * (DECODE_S / MAX_RUNNING + DECODE_S_PER_SEQUENCE)
SLOWDOWN = 1 + ((_E + _P + _D) / GAIN - _P - _D) / _E

DEVICE = StageDevice(
    name="Atlas 800I A2, openPangu-7B-VL",
    encode_s_per_token=ENCODE_S_PER_TOKEN,
    prefill_s_per_token=PREFILL_S_PER_TOKEN,
    decode_s=DECODE_S,
    decode_s_per_sequence=DECODE_S_PER_SEQUENCE,
    front_s=FRONT_S,
    handover_s=_SCHEDULING.intercept,
    handover_s_per_token=_SCHEDULING.slope,
    kv_exposed_s=KV_EXPOSED_S,
    encode_slows_prefill=SLOWDOWN,
    encode_slows_decode=SLOWDOWN,
    prefill_slows_decode=SLOWDOWN,
    max_running=MAX_RUNNING,
    step_tokens=2048,  # likewise: --max-num-batched-tokens, prompts are chunked there
    # §4.1: 64 GB a device; vLLM takes 0.9 of it; weights of 7.7 B parameters of 2 bytes; the rest is KV. Stages that
    # share a device have less, but no layout of Table 5 comes near it.
    kv_tokens=int((64e9 * 0.9 - 7.7e9 * 2) / KV_BYTES_PER_TOKEN),
    block_tokens=128,  # vllm-ascend's KV block
)

_STRICT_TPOT_S = 0.030  # §4.4: 84.96 % of (E-P)-D's requests keep 30 ms at 4 requests a second and device
_STRICT_BATCH = 4 * 2 * OUTPUT_TOKENS * _STRICT_TPOT_S

READINGS: Mapping[str, StageDevice] = {
    "encode is what 160 ms at 720p leave": replace(
        DEVICE, encode_s_per_token=FIRST_TOKEN_720P_S / 1196 - PREFILL_S_PER_TOKEN
    ),
    "decode keeps §4.4's 30 ms": replace(DEVICE, decode_s=_STRICT_TPOT_S - DECODE_S_PER_SEQUENCE * _STRICT_BATCH),
    "unlike work is not slowed": replace(
        DEVICE,
        encode_slows_decode=1.0,
        prefill_slows_decode=1.0,
        encode_slows_prefill=1 + (SLOWDOWN - 1) * (_P + _D) / _P,  # the same gain of (E-PD) over TP1
    ),
    "no slowdown at all": replace(DEVICE, encode_slows_prefill=1.0, encode_slows_decode=1.0, prefill_slows_decode=1.0),
    "processes take turns": replace(
        DEVICE, encode_slows_prefill=2.0, encode_slows_decode=2.0, prefill_slows_decode=2.0
    ),
    "steps of 8192 tokens": replace(DEVICE, step_tokens=8192),
    "no handover from E to P": replace(DEVICE, handover_s=0.0, handover_s_per_token=0.0),
}
"""What the sources can mean otherwise, one at a time."""
