"""One trace of one request through the proxy and real stages: vLLM's own spans are children of our calls, and the same
request as a file has what the stages did on their tracks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.workloads.synthetic import demo_body, demo_image
from tests.deploy.cli.trace_format import check
from tests.e2e.serving import MODEL, ROOT, serving
from tests.otlp import collector
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
LAYOUT = "(E-P)-D"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ENGINE = "llm_request"
SPANS_S = 30.0


def test_a_request_is_one_trace_across_proxy_encode_prefill_and_decode(tmp_path: Path) -> None:
    stamps, out = tmp_path / "stamps", tmp_path / "trace.json"
    with collector() as got, serving(LAYOUT, "--trace-dir", str(stamps), "--otlp-traces-endpoint", got.url) as launch:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = launch.post("/v1/chat/completions", demo_body(MODEL, demo_image(7, 224)), headers=headers)
        assert answer.status_code == 200

        def here() -> bool:
            engines = [span for span in got.spans if span.name == ENGINE and span.trace_id == TRACE]
            return len(engines) == 3 and any(span.parent_id == PARENT for span in got.spans)

        wait_for(here, "the spans of proxy and three engines", SPANS_S)
        asked = ("trace", "mine", "--out", str(out), "--run-root", str(launch.root / "run"))
        subprocess.run([sys.executable, "-m", "deploy.cli", *asked], cwd=ROOT, check=True, capture_output=True)
    spans = [span for span in got.spans if span.trace_id == TRACE]
    (root,) = (span for span in spans if span.parent_id == PARENT)
    by_name = {span.name: span for span in spans}
    engines = {span.service: span for span in spans if span.name == ENGINE}
    calls = {"epd-serve-E0": "encode call E0", "epd-serve-P0": "prefill call P0", "epd-serve-D0": "answer call D0"}
    assert engines.keys() == calls.keys()
    for service, name in calls.items():
        call, engine = by_name[name], engines[service]
        assert call.parent_id == root.span_id and engine.parent_id == call.span_id
        assert call.begin_ns <= engine.begin_ns, "one host has one clock"
        assert engine.attributes["gen_ai.usage.prompt_tokens"] > 0
    assert root.attributes["epd.path"] == "E-P-D"

    events = check(out.read_text())
    tracks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    names = {track: {one["name"] for one in events if one["pid"] == pid} for track, pid in tracks.items()}
    assert {"encode call", "preprocess E", "encode"} <= names["E0"]
    assert {"prefill call", "preprocess P", "prefill"} <= names["P0"]
    assert {"answer call", "first token", "P→D"} <= names["D0"]
    assert {"/v1/chat/completions", "media", "encode"} <= names["front.0"]
