"""Roles: which of the three stages an instance runs, and what follows from it. Data, no behaviour elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

ROLE_LABEL = "llm-d.ai/role"
"""The label by which llm-d's routers tell what a server does."""
_STAGES = {"encode": "E", "prefill": "P", "decode": "D"}


class Role(StrEnum):
    """Stage letters of one instance; adjacent letters are one fused instance (design, layout notation)."""

    E = "E"
    P = "P"
    D = "D"
    EP = "EP"
    PD = "PD"
    ED = "ED"
    EPD = "EPD"

    @property
    def encodes(self) -> bool:
        """Runs the vision/audio tower as its duty."""
        return "E" in self

    @property
    def prefills(self) -> bool:
        return "P" in self

    @property
    def decodes(self) -> bool:
        return "D" in self

    @property
    def word(self) -> str:
        """What llm-d calls it, such as `encode` or `prefill-decode`; of `ED`, which it does not know, alike."""
        return "-".join(word for word, letter in _STAGES.items() if letter in self)

    @property
    def labels(self) -> dict[str, str]:
        """By which llm-d's routers find it."""
        return {ROLE_LABEL: self.word} if self is not Role.ED else {}

    def runs(self, stages: Iterable[str]) -> bool:
        """Whether it runs all of these, which are letters."""
        return set(stages) <= set(self)

    @property
    def has_language_model(self) -> bool:
        return self is not Role.E

    @property
    def sends_features(self) -> bool:
        """E→P producer: only the encode-only instance hands features to others."""
        return self is Role.E

    @property
    def takes_features(self) -> bool:
        """E→P consumer: an instance with a language model but without the duty to encode."""
        return self.has_language_model and not self.encodes

    @property
    def sends_kv(self) -> bool:
        """P→D producer: prefills but does not decode."""
        return self.prefills and not self.decodes

    @property
    def takes_kv(self) -> bool:
        """P→D consumer: decodes but does not prefill."""
        return self.decodes and not self.prefills


def stages_of(word: str) -> str:
    """The letters of a word for a role, `PD` of `prefill-decode`; "" where it is none."""
    letters = "".join(_STAGES.get(one, "?") for one in word.split("-"))
    return letters if letters in set(Role) else ""
