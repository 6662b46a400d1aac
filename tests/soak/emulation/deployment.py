"""Requests of the load generator through the planner's simulator, and back as its rows: so every figure that a measured
run has, an emulated one has by the same code.

Of a stream first and last token are known; those between are spread evenly: judge such rows by the mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from bench.workloads.requests import RequestSpec
from bench.workloads.traffic import traffic_of
from deploy.planner.fleet import Options
from deploy.planner.simulate import Served, simulate
from epd_serve.layout import Layout
from epd_serve.sim.items import MERGE, PATCH_PIXELS
from epd_serve.traffic import Request
from tests.soak.emulation.device import StageDevice


def _tokens(width: int, height: int) -> int:
    """A token per 28x28 pixels, as with simulated stages (`epd_serve/sim/items.py`)."""
    side = PATCH_PIXELS * MERGE
    return max(1, round(width / side)) * max(1, round(height / side))


def emulate(
    layout: Layout, device: StageDevice, requests: Iterable[RequestSpec], label: str, policy: str = "least-loaded"
) -> Run:
    """Serve `requests`, each of which has an `arrival_s`, on devices that are all `device`. Streams begin with D's
    token, as when EPD-Serve was measured.

    Args:
        label: of the run, in its rows.
        policy: of the proxy; the default is EPD-Serve's (§3.4), which knows nothing of neighbours.
    """
    own = [traffic_of(spec, _tokens) for spec in requests]
    options = Options(policy=policy, first_token="decode")
    found = simulate(layout, device.profile(), own, options=options)
    run = Run(label, sent=len(own), issued_s=max((one.at_s for one in own), default=0.0))
    for asked, one in sorted(zip(own, found.served, strict=True), key=lambda pair: pair[1].last_s):
        run.rows.append(_row(label, len(run.rows), asked, one))
    run.ended_s = max((row.ended_s for row in run.rows), default=0.0)
    return run


def _row(label: str, number: int, asked: Request, one: Served) -> RequestRecord:
    """What the request sender would have noted."""
    step_s = one.tpot_s or 0.0
    return RequestRecord(
        *(label, number, one.id, one.id, one.at_s, one.at_s, one.last_s, Outcome.OK, one.at_s),
        token_s=(*tuple(one.first_s + step_s * at for at in range(one.tokens - 1)), one.last_s),
        last_s=one.last_s,
        status=200,
        usage_tokens=one.tokens,
        prompt_tokens=asked.prompt_tokens,
        finish_reason="length",
        path=one.path,
        instances=",".join(one.instances),
    )
