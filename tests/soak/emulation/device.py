"""One device with one model, as papers describe it, and as the profile that the planner's simulator takes. Pure.

The numbers of each device are in a file of its own beside this one, each with its source; a sensitivity varies them one
at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from deploy.planner.profile import DeviceProfile
from epd_serve.sim.profile import Capacity, Line, Profile


@dataclass(frozen=True)
class StageDevice:
    """One device with one model. Times are those of a stage alone on its device.

    Attributes:
        encode_s_per_token: vision tower, per token of the language model that it makes.
        prefill_s_per_token: of a step, per prompt token.
        decode_s: a decode step as its batch goes to none. decode_s_per_sequence: added by each sequence in it.
        front_s: from the client to a stage's scheduler: HTTP, decoding and preprocessing the picture, the proxy.
        handover_s, handover_s_per_token: from the end of an item's encode until P can schedule it, where another
            process encodes. The feature's transfer hides behind it (Table 3: below 4K).
        kv_exposed_s: from the end of prefill until D has the KV.
        encode_slows_prefill, encode_slows_decode: how many times as long both of two such steps take while they run on
            one device; prefill_slows_decode likewise. 1: they do not feel each other; 2: they take turns.
        max_running, step_tokens, kv_tokens, block_tokens: see `epd_serve/sim/profile.py: Capacity`. An encoder takes
            step_tokens item tokens in a step.
    """

    name: str
    encode_s_per_token: float
    prefill_s_per_token: float
    decode_s: float
    decode_s_per_sequence: float
    front_s: float
    handover_s: float
    handover_s_per_token: float
    kv_exposed_s: float
    encode_slows_prefill: float
    encode_slows_decode: float
    prefill_slows_decode: float
    max_running: int
    step_tokens: int
    kv_tokens: int
    block_tokens: int

    def stage(self) -> Profile:
        """Of its stages, as simulated stages take it (`--sim-profile`)."""
        return Profile(
            encode=Line(0.0, self.encode_s_per_token),
            prefill=Line(0.0, self.prefill_s_per_token),
            kv=Line(self.kv_exposed_s, 0.0),
            decode_step_s=(
                (1.0, self.decode_s + self.decode_s_per_sequence),
                (2.0, self.decode_s + 2 * self.decode_s_per_sequence),
            ),
            capacity=Capacity(
                max_running=self.max_running,
                step_tokens=self.step_tokens,
                kv_tokens=self.kv_tokens,
                block_tokens=self.block_tokens,
                encoder_tokens=self.step_tokens,
            ),
        )

    def profile(self) -> DeviceProfile:
        return DeviceProfile(
            model="",
            device=self.name,
            stages={1: self.stage()},
            how="paper",
            front=Line(self.front_s),
            handover=Line(self.handover_s, self.handover_s_per_token),
            kv=Line(self.kv_exposed_s),
            slowdown={
                "encode+prefill": self.encode_slows_prefill,
                "encode+decode": self.encode_slows_decode,
                "prefill+decode": self.prefill_slows_decode,
            },
        )

    def scaled(self, constant: str, factor: float) -> StageDevice:
        """The same with one constant multiplied. Nothing becomes faster by sharing: such a factor ends at 1."""
        value = getattr(self, constant) * factor
        if constant in SLOWDOWNS:
            value = max(1.0, value)
        return replace(self, **{constant: round(value) if constant in COUNTS else value})


COUNTS = ("max_running", "step_tokens", "kv_tokens")
SLOWDOWNS = ("encode_slows_prefill", "encode_slows_decode", "prefill_slows_decode")
CONSTANTS = tuple(one.name for one in fields(StageDevice) if one.name not in ("name", "block_tokens"))
"""What a sensitivity varies."""
