"""A pair of devices, one of which prefills while its KV goes to the other: how long layers and packets take. Pure.

The numbers of each device are in a file of its own beside this one, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DevicePair:
    """Times of a model on such a pair.

    Attributes:
        layers: of the model.
        bytes_per_token: of KV, all layers together.
        s_per_token: compute of one layer, per token of the step.
        s_per_token_squared: compute of one layer that attention adds, times end² - begin² of each chunk.
        setup_s, s_per_byte: a packet takes setup_s + s_per_byte · bytes.
        setup_s_per_part: added for each further request whose KV is in the packet.
        tail: the part of a layer's compute that comes after its KV is written. The end of the last layer is the end
            of prefill, so this is also what may hide the last packet.
    """

    name: str
    layers: int
    bytes_per_token: float
    s_per_token: float
    s_per_token_squared: float
    setup_s: float
    s_per_byte: float
    setup_s_per_part: float = 0.0
    tail: float = 0.0

    def layer_s(self, chunks: list[tuple[int, int]]) -> float:
        """Compute of one layer in a step of such chunks [first token, last token)."""
        tokens = sum(end - begin for begin, end in chunks)
        return self.s_per_token * tokens + self.s_per_token_squared * sum(end**2 - begin**2 for begin, end in chunks)

    def layer_bytes(self, tokens: int) -> int:
        return round(self.bytes_per_token * tokens / self.layers)

    def packet_s(self, size_bytes: int, parts: int) -> float:
        return self.setup_s + self.setup_s_per_part * (parts - 1) + self.s_per_byte * size_bytes

    def scaled(self, *, setup: float = 1.0, bandwidth: float = 1.0, compute: float = 1.0) -> DevicePair:
        """The same with these constants multiplied. `compute` is the compute time."""
        return replace(
            self,
            setup_s=self.setup_s * setup,
            s_per_byte=self.s_per_byte / bandwidth,
            s_per_token=self.s_per_token * compute,
            s_per_token_squared=self.s_per_token_squared * compute,
        )
