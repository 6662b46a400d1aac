"""A pair of devices, one of which prefills while its KV goes to the other: how long layers and packets take. Pure.

The numbers of each device are in a file of its own beside this one, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd_serve.kv.grouping import LinkCost, Step


@dataclass(frozen=True)
class DevicePair:
    """Times of a model on such a pair.

    Attributes:
        layers: of the model.
        bytes_per_token: of KV, all layers together.
        s_per_token: compute of one layer, per token of the step.
        s_per_token_squared: compute of one layer that attention adds, times the square of each prompt's tokens.
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

    def step(self, tokens: int, requests: int) -> Step:
        """The prefill step of so many prompts of so many tokens each."""
        layer_s = requests * (self.s_per_token * tokens + self.s_per_token_squared * tokens**2)
        layer_bytes = round(self.bytes_per_token * tokens * requests / self.layers)
        return Step(self.layers, layer_bytes, layer_s, slack_s=self.tail * layer_s)

    def link(self, requests: int) -> LinkCost:
        """Of packets that so many requests share."""
        return LinkCost(self.setup_s + self.setup_s_per_part * (requests - 1), self.s_per_byte)

    def scaled(self, *, setup: float = 1.0, bandwidth: float = 1.0, compute: float = 1.0) -> DevicePair:
        """The same with these constants multiplied. `compute` is the compute time."""
        return replace(
            self,
            setup_s=self.setup_s * setup,
            s_per_byte=self.s_per_byte / bandwidth,
            s_per_token=self.s_per_token * compute,
            s_per_token_squared=self.s_per_token_squared * compute,
        )
