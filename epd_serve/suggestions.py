"""The one sentence that turns a misspelled or withdrawn key or flag into its correction."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

WITHDRAWN = {
    "feature_path": "features pass through host memory on every device, and no way past it is offered; leave it out",
    "admission.single_queue": "admission.order=fcfs is order of arrival",
    "admission.media_yields_s": "who is first follows from the SLOs (slo.ttft_s, model_slos, x-epd-slo-ttft-ms)",
    "admission.text_share": "the SLOs say who is first, and accounts have shares (key_limits.weight); leave it out",
    "admission.media_share": "the SLOs say who is first, and accounts have shares (key_limits.weight); leave it out",
}
"""Options of former versions, by name, and what to do instead."""


def unknown(what: str, word: str, valid: Iterable[str]) -> str:
    """`unknown key 'layuot'; did you mean 'layout'?`, or the list of valid ones when nothing is near."""
    if (instead := WITHDRAWN.get(word.lstrip("-").replace("-", "_"))) is not None:
        return f"{what} {word!r} is no longer there: {instead}"
    names = sorted(valid)
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    if near:
        return f"unknown {what} {word!r}; did you mean {near[0]!r}?"
    return f"unknown {what} {word!r}; valid: {', '.join(names)}"
