"""Roles: which of the three stages an instance runs, and what follows from it. Data, no behaviour elsewhere."""

from __future__ import annotations

from enum import StrEnum


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
