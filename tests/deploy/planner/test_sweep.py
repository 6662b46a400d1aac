"""What is sent to be measured: nothing that the model does not take, and everything that a profile needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.planner.steps import Sent
from deploy.planner.sweep import QUICK, Extent, Launch, Sweep, launches
from epd_serve.trace import STEP, Trace


class FakeLaunched:
    """Answers at once. `most`: tokens of the longest prompt with its answer. `widest`: most prompts at a time."""

    def __init__(self, traces: Path, max_model_len: int) -> None:
        self.traces, self.max_model_len, self.start_s = traces, max_model_len, 1.0
        self.most = self.widest = self.pictures = 0
        trace = Trace(str(traces / "PD0.jsonl"), "PD0")
        trace.stamp("", STEP, t0=0.0, prompt_tokens=1, item_tokens=0, decodes=0, context_tokens=0, kv_tokens=0)
        trace.close()

    def stages(self) -> list[dict[str, int]]:
        return [{"kv_tokens": 0, "max_running": 5}, {"kv_tokens": 50_000, "max_running": 16}]

    def ids(self, count: int) -> list[int]:
        return [1] * count

    def text(self, ids: Sequence[int], tokens: int = 1) -> Sent:
        assert ids
        self.most = max(self.most, len(ids) + tokens)
        return Sent(1.0, 2.0, tokens)

    def image(self, side: int, tokens: int = 1) -> Sent:
        self.pictures += 1
        return Sent(1.0, 2.0, tokens)

    def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.widest = max(self.widest, len(prompts))
        for ids in prompts:
            self.text(ids, tokens)

    @contextmanager
    def cpu(self) -> Iterator[list[float]]:
        spent: list[float] = []
        yield spent
        spent.append(0.5)


@pytest.mark.parametrize("extent", [replace(QUICK, beside_s=0.01), Extent(beside_s=0.01)], ids=["quick", "whole"])
@pytest.mark.parametrize("max_model_len", [640, 4096, 131_072])
@pytest.mark.parametrize("launch", launches(2, [1], multimodal=True), ids=lambda one: one.name)
def test_everything_that_is_sent_fits_the_model(
    launch: Launch, max_model_len: int, extent: Extent, tmp_path: Path
) -> None:
    served = FakeLaunched(tmp_path, max_model_len)
    sweep = Sweep(launch, served, extent, multimodal=True)
    for _, act in sweep.actions():
        act()
    part = sweep.part()
    assert served.most <= max_model_len
    if launch.name == "alone":
        assert served.widest == 16 and served.most > 0.75 * min(max_model_len, 32_768)
        assert (part.kv_tokens, part.max_running, part.max_model_len) == (50_000, 16, max_model_len)
    assert served.pictures and not part.steps, "that of warming up is left out"
    assert bool(part.front_busy) is (launch.name == "alone")
    assert bool(part.alone) is (launch.name in ("alone", "encode+prefill"))


def test_no_prompt_is_longer_than_one_that_took_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    served = FakeLaunched(tmp_path, 131_072)

    def slow(ids: Sequence[int], tokens: int = 1) -> Sent:
        nonlocal now
        now += len(ids) / 200
        return FakeLaunched.text(served, ids, tokens)

    monkeypatch.setattr("deploy.planner.sweep.time.monotonic", lambda: now)
    monkeypatch.setattr(served, "text", slow)
    (launch,) = launches(2, [1], multimodal=True, only=["alone"])
    for label, act in Sweep(launch, served, Extent(), multimodal=True).actions():
        if "decode" not in label:
            act()
    assert served.most == 4096 + 1, "which takes 20 s"
