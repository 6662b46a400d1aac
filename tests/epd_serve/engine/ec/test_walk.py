"""How many files one feature passes, from the encoder's output at E to the model at P: who follows it reads those."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import epd_serve
from epd_serve.roles import Role
from tests.epd_serve.engine.ec.stages import feature
from tests.epd_serve.engine.ec.vllm_stub import ECConnectorRole, Make, output, request
from tests.waiting import wait_for

ROOT = f"{Path(epd_serve.__file__).parents[1]}/"
OURS = ("epd_serve/", "store/", "npu_ops/")
APART = {"epd_serve/peers.py", "epd_serve/sockets.py", "epd_serve/engine/ec/store_access.py", "epd_serve/trace.py"}
"""By the clock, whoever passes (of the store's, reports); and stamps, where nobody has asked for a trace."""
MOST = 14
"""About 36 before a feature was one row of one table."""


class Launch:
    """E and P, each with vLLM's two sides."""

    def __init__(self, make: Make) -> None:
        sides = [(role, side) for role in (Role.E, Role.P) for side in ECConnectorRole]
        self.e, self.e_worker, self.p, self.p_worker = (make(role, side) for role, side in sides)
        self.cache: dict[str, torch.Tensor] = {}  # of E's model

    def awaited(self, key: str) -> Any:
        """The request for this feature is at both: E encodes, P waits."""
        asked = request(key, key)
        assert self.e.ensure_cache_available(asked, 0) and not self.e.has_cache_item(key)
        self.e.update_state_after_alloc(asked, 0)
        self.e_worker.bind_connector_metadata(self.e.build_connector_meta(output()))
        self.e_worker.start_save_caches(encoder_cache=self.cache)
        self.p.consumer.arrived(asked)
        assert not self.p.ensure_cache_available(asked, 0)
        return asked

    def passes(self, asked: Any, key: str) -> torch.Tensor:
        """From E's model to P's."""
        loaded: dict[str, torch.Tensor] = {}
        self.e_worker.save_caches(self.cache, key)
        wait_for(lambda: self.p.ensure_cache_available(asked, 0))
        assert self.p.has_cache_item(key)
        self.p.update_state_after_alloc(asked, 0)
        self.p_worker.bind_connector_metadata(self.p.build_connector_meta(output()))
        self.p_worker.start_load_caches(loaded)
        return loaded[key]

    def ends(self, asked: Any) -> None:
        for scheduler in (self.e, self.p):
            scheduler.request_finished(asked)
            scheduler.build_connector_meta(output(asked.request_id))


def test_a_feature_passes_few_files(make: Make) -> None:
    passed = followed(make)
    assert {"epd_serve/engine/ec/features.py", "store/arena/arena.py"} <= passed
    assert len(passed) <= MOST, " ".join(sorted(passed))


def followed(make: Make) -> set[str]:
    """Files of ours with code that ran meanwhile, in whatever thread."""
    passed: set[str] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename.removeprefix(ROOT)
        if event == "call" and name.startswith(OURS):
            passed.add(name)

    threading.setprofile(called)
    try:
        launch = Launch(make)
        for key in ("hello", "k"):  # what is made once is made with the first
            asked = launch.awaited(key)
            launch.cache[key] = feature()
            passed.clear()
            sys.setprofile(called)
            launch.passes(asked, key)
            sys.setprofile(None)
            launch.ends(asked)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return passed - APART
