"""Ascend Atlas 800I A2 with a 7B model, from what EPD-Serve publishes of it: every constant with its source.

Nothing here was measured by us. Table 4 has four rows and no sizes of packets, so most constants are solutions of the
equations written beside them; which row they come from is said, because the other rows are then predictions.

What the table leaves open, and what we do about it:
- The model is not named. We take openPangu-7B's 34 layers. By its model card it has 8 KV heads, so its KV would be
  34 · 8 · 128 · 2 · 2 B = 139 264 B per token; latency · bandwidth gives four times that (32 heads: 557 056 B; 9.0
  binary GB would be 36 layers of 16 KiB per token exactly, as Qwen3-VL-8B has layers). Only times enter an emulation,
  so the payload is taken as it follows from the table; 36 layers are one of its variations.
- Group sizes are not given. `OPTIMISED_GROUPS` is an assumption.
- The optimised rows do not lie on one line with the layer-wise ones (11.71 GB/s at 2048 tokens is below 12.58 at
  1024, in larger packets). The 1024 rows set the line; how far off it is at 2048 is printed with the results.
"""

from __future__ import annotations

from dataclasses import replace

from tests.epd_serve.kv.device_pair import DevicePair
from tests.soak.emulation.printed import TABLE_4_CONCURRENCY as CONCURRENCY
from tests.soak.emulation.printed import TABLE_4_GROUPED as GROUPED
from tests.soak.emulation.printed import TABLE_4_LAYERWISE as LAYERWISE

LAYERS = 34  # openPangu-Embedded-7B-V1.1, model card: "Number of Layers 34"; §4.1 names openPangu-7B-VL first
LAYERS_QWEN3 = 36  # Qwen3-VL-8B, the other model of §4.1; a variation

# Table 4, 1024 tokens: KV latency · bandwidth = 1127.45 ms · 7.98 GB/s = 8.997 GB and 715.53 ms · 12.58 GB/s =
# 9.001 GB; at 2048 tokens both rows give 18.0 GB. 9.0 GB for 16 · 1024 tokens.
BYTES_PER_TOKEN = 9.0e9 / (CONCURRENCY * 1024)

# Layers over which the optimised rows group: the paper has "adjacent layers", no number. 4 packets per request: with
# compute ten times slower than the link, no more are needed to hide all but the last.
OPTIMISED_GROUPS = 4

# Table 4, 1024 tokens. Each request's layer is one packet in the layer-wise row, 34 · 16 of them; each request's group
# in the optimised row, 4 · 16. The bytes are the same:
#   1127.45 ms = 544 · a + 9.0 GB · b,   715.53 ms = 64 · a + 9.0 GB · b   ⟹   a = 411.92 ms / 480 = 0.858 ms
SETUP_S = (LAYERWISE[1024].kv_ms - GROUPED[1024].kv_ms) / 1e3 / (CONCURRENCY * (LAYERS - OPTIMISED_GROUPS))
# and b = (715.53 ms - 64 · 0.858 ms) / 9.0 GB = 1 / (13.6 GB/s)
S_PER_BYTE = (GROUPED[1024].kv_ms / 1e3 - CONCURRENCY * OPTIMISED_GROUPS * SETUP_S) / (
    BYTES_PER_TOKEN * CONCURRENCY * 1024
)

# Table 4, prefill latency of the layer-wise rows: 6793.50 ms / 34 = 199.8 ms and 14349.47 ms / 34 = 422.0 ms per layer
# for 16 prompts of n tokens. A layer costs α per token and, by attention, β per token and token of its prompt:
#   199.8 ms / 16384 = α + 1024 β = 12.195 µs,   422.0 ms / 32768 = α + 2048 β = 12.880 µs
_PER_TOKEN_S = {tokens: row.prefill_ms / 1e3 / LAYERS / (CONCURRENCY * tokens) for tokens, row in LAYERWISE.items()}
S_PER_TOKEN_SQUARED = (_PER_TOKEN_S[2048] - _PER_TOKEN_S[1024]) / 1024  # β = 0.67 ns

# The paper's layer-by-layer baseline hides 1127.45 - 955.24 = 172.2 ms at 1024 tokens, where one layer computes for
# 199.8 ms, and 1688.40 - 1264.87 = 423.5 ms at 2048, where one layer computes for 422.0 ms: what it hides is about one
# layer's compute, as if no packet left before the last layer begins. §3.3: the "metadata handshake, which introduces
# unpredictable latency … delays hierarchical KV transmission, preventing full communication-computation overlap".
# So nothing of the emulated baseline leaves before the last layer begins (`emulated_transfers.py`).

DEVICE = DevicePair(
    name="Atlas 800I A2, openPangu-7B",
    layers=LAYERS,
    bytes_per_token=BYTES_PER_TOKEN,
    s_per_token=_PER_TOKEN_S[1024] - 1024 * S_PER_TOKEN_SQUARED,  # α = 11.5 µs
    s_per_token_squared=S_PER_TOKEN_SQUARED,
    setup_s=SETUP_S,
    s_per_byte=S_PER_BYTE,
    # §3.3: "When Prefill begins computation of the (L+1)-th layer, the KV-Cache from the L-th layer is asynchronously
    # transmitted": no part of a layer comes after its KV.
    tail=0.0,
)

# By the optimised rows it cannot be none: 8.76 and 1.16 ms exposed are less than one layer's bytes take at the
# bandwidth beside them (21 and 45 ms). KV is written before the MLP: 3 · 4096 · 12800 of the 3 · 4096 · 12800 +
# 2 · 4096 · 4096 + 2 · 4096 · 1024 weights of a layer come after it (openPangu-Embedded-7B's config.json: hidden size
# 4096, intermediate size 12800, 32 query heads and 8 KV heads of 128).
TAIL_AFTER_ATTENTION = 3 * 12800 / (3 * 12800 + 2 * 4096 + 2 * 1024)  # 0.79

SOURCED = "as sourced"
THIRTY = {
    f"{constant} {sign}30%": DEVICE.scaled(**{constant: factor})
    for constant in ("setup", "bandwidth", "compute")
    for sign, factor in (("-", 0.7), ("+", 1.3))
}
VARIATIONS = {
    SOURCED: DEVICE,
    **THIRTY,
    "36 layers": replace(DEVICE.scaled(compute=LAYERS / LAYERS_QWEN3), layers=LAYERS_QWEN3),
    "KV leaves before the MLP": replace(DEVICE, tail=TAIL_AFTER_ATTENTION),
    "setup per request": replace(DEVICE, setup_s_per_part=DEVICE.setup_s),
    "a tenth of the bandwidth": DEVICE.scaled(bandwidth=0.1),
}
"""What the sources leave open, one at a time. A tenth of the bandwidth is no reading of the paper: there the link is
slower than the compute, and sizes are harder to choose."""
