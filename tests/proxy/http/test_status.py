"""What the proxy says about itself, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.config.limits import MediaLimits, Timeouts
from tests.proxy.fakes import Cluster, cluster, data_url, encodes, image_body, image_file, settings, text_body

EPD = (Role.E, Role.P, Role.D)
IMAGES = frozenset({"image"})


async def statuses(c: Cluster, *paths: str) -> list[int]:
    return [(await c.client.get(path)).status_code for path in paths]


async def test_health_is_true_while_any_path_serves() -> None:
    async with cluster("E0", "P0", "D0", "D1", wanted=EPD) as c:
        for name in ("D1", "E0"):
            c.table.mark_down(name, "killed by signal 9")
            assert await statuses(c, "/health", "/ready") == [200, 200], f"without {name} others serve"
        c.table.mark_down("P0", "killed")
        unhealthy = await c.client.get("/health")
        assert (unhealthy.status_code, unhealthy.json()) == (503, {"status": "unavailable", "missing": ["E", "P"]})
        assert await statuses(c, "/ready", "/live") == [503, 200]
        c.table.mark_up("P0")
        assert await statuses(c, "/health", "/ready") == [200, 200]


async def test_the_health_of_a_role_is_asked_by_llm_d_s_word_for_it() -> None:
    async with cluster("E0", "PD0", "PD1", wanted=(Role.E, Role.PD)) as c:
        roles = [f"/health?role={word}" for word in ("encode", "prefill", "decode", "prefill-decode")]
        assert await statuses(c, *roles) == [200] * 4
        c.table.mark_down("E0", "killed")
        c.table.mark_down("PD1", "killed")
        assert await statuses(c, *roles) == [503, 200, 200, 200]
        unknown = [f"/health?role={word}" for word in ("encode-prefill", "encode-prefill-decode", "E", "", "decode-x")]
        assert await statuses(c, *unknown) == [404] * 5
        answer = (await c.client.get("/health?role=encode-prefill")).json()["error"]
        assert answer["code"] == "unknown_role" and "encode, prefill-decode" in answer["message"]
        c.pipeline.drain.announce()
        assert await statuses(c, *roles) == [503] * 4


async def test_instances_and_the_model_say_their_roles_in_llm_d_s_words() -> None:
    async with cluster("E0", "P0", "D0", "PD0", "EPD0", "EP0", "ED0") as c:
        instances = (await c.client.get("/instances")).json()["instances"]
        assert (await c.client.get("/v1/models")).json()["data"][0]["role"] == "encode-prefill-decode"
    assert {one["id"]: one["labels"].get("llm-d.ai/role") for one in instances} == {
        "E0": "encode",
        "P0": "prefill",
        "D0": "decode",
        "PD0": "prefill-decode",
        "EPD0": "encode-prefill-decode",
        "EP0": "encode-prefill",
        "ED0": None,
    }


@pytest.mark.parametrize(
    "headers",
    [
        {"x-prefiller-host-port": "10.0.0.9:8000", "x-encoder-hosts-ports": "10.0.0.8:8000,10.0.0.7:8000"},
        {"x-data-parallel-host-port": "10.0.0.9:8001", "x-kv-cache-source-host-port": "10.0.0.9:8002"},
        {"EPP-Profile": "encode"},
        {"x-request-id": "chatcmpl-1:0:1", "x-gateway-inference-objective": "batch"},
    ],
)
async def test_what_a_router_before_it_says_of_other_servers_reaches_no_stage(headers: dict[str, str]) -> None:
    async with cluster("E0", "P0", "D0") as c:
        c["E0"].usual = encodes()
        answer = await c.client.post("/v1/chat/completions", json=image_body(data_url(image_file())), headers=headers)
        assert answer.status_code == 200, answer.text
        calls = [call for stage in c.stages.values() for call in stage.calls]
    assert len(calls) == 3
    for call in calls:
        assert not {name.lower() for name in headers} - {"x-request-id"} & set(call.headers)
        assert headers.get("x-request-id") != call.headers["x-request-id"]


async def test_readiness_tells_each_kind_and_how_it_is_served_meanwhile() -> None:
    async with cluster("E0", "P0", "D0", wanted=EPD, config=settings(modalities=IMAGES)) as c:
        ready = (await c.client.get("/ready")).json()
        assert ready["status"] == "ready" and ready["kinds"] == {
            "text": {"served": True, "how": "P-D"}, "image": {"served": True, "how": "E-P-D"}
        }  # fmt: skip
        c.table.mark_down("E0", "killed")
        response = await c.client.get("/ready?kind=image")
        assert response.status_code == 200
        assert response.json()["status"] == "degraded" and response.json()["missing"] == ["E"]
        assert response.json()["kinds"]["image"]["how"] == "P-D (no encoder is live: prefill encodes)"
        assert (await c.ask()).status_code == 200, "as it says"
        c.table.mark_down("D0", "killed")
        response = await c.client.get("/ready?kind=text")
        assert response.status_code == 503 and not response.json()["kinds"]["text"]["served"]
        unknown = await c.client.get("/ready?kind=audio")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_kind"


async def test_all_of_readiness_wants_every_instance_and_every_feeder() -> None:
    async with cluster("P0", "D0", "D1", wanted=(Role.P, Role.D)) as c:
        assert await statuses(c, "/ready?all") == [200]
        c.table.mark_down("D1", "killed")
        assert await statuses(c, "/ready", "/ready?all") == [200, 503]
        c.table.mark_up("D1")
        assert await statuses(c, "/ready?all") == [200]
        c.pipeline.background.elsewhere = {"silence of members": "KeyError: 'E0'"}
        assert await statuses(c, "/ready", "/health", "/ready?all") == [200, 200, 503]
        assert (await c.client.get("/ready")).json()["down"] == {"silence of members": "KeyError: 'E0'"}


async def test_who_is_about_to_end_is_not_ready_and_still_serves() -> None:
    async with cluster("PD0") as c:
        c.pipeline.drain.announce()
        assert await statuses(c, "/ready", "/health", "/ready?kind=text", "/live") == [503, 503, 503, 200]
        assert (await c.client.get("/ready")).json()["status"] == "draining"
        assert (await c.client.post("/v1/chat/completions", json=text_body())).status_code == 200
        c.pipeline.drain.begin()
        refused = await c.client.post("/v1/chat/completions", json=text_body())
        assert refused.status_code == 503 and refused.headers["connection"] == "close"


async def test_an_empty_table_is_neither_healthy_nor_ready() -> None:
    async with cluster() as c:
        assert await statuses(c, "/health", "/ready", "/ready?all") == [503, 503, 503]


async def test_a_bug_of_ours_is_an_openai_shaped_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("PD0") as c:

        def bug(*_: object) -> None:
            raise KeyError("oops")

        monkeypatch.setattr("proxy.pipeline.parse", bug)
        response = await c.client.post("/v1/chat/completions", json=text_body())
        assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
        assert response.headers["connection"] == "close"  # which the server does after what an application raises
        await c.idle()


async def test_models_version_instances_and_metrics() -> None:
    async with cluster("PD0", config=settings(served_models=("demo", "alias"), max_model_len=4096)) as c:
        await c.client.post("/v1/chat/completions", json=text_body())
        models = (await c.client.get("/v1/models")).json()
        assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["demo", "alias"]
        assert models["data"][0]["object"] == "model" and models["data"][0]["max_model_len"] == 4096
        assert set((await c.client.get("/version")).json()) == {"version"}
        [row] = (await c.client.get("/instances")).json()["instances"]
        assert row["id"] == "PD0" and row["up"] and row["in_flight"] == {"encode": 0, "prefill": 0, "decode": 0}
        metrics = (await c.client.get("/metrics")).text
        assert 'epd_proxy_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in metrics
        assert 'epd_proxy_paths_total{path="PD"} 1.0' in metrics


async def test_the_table_shows_what_each_stage_reports_of_its_load() -> None:
    async with cluster("P0", "D0") as c:
        incarnation = c.table.instance("P0").incarnation
        c.table.report(StageReport("P0", incarnation, 3, waiting=2, running=1, pending_prompt_tokens=77))
        p, d = (await c.client.get("/instances")).json()["instances"]
        assert p["load"] == 77 and d["load"] == 0 and d["stage"] is None
        assert {"seq": 3, "waiting": 2, "running": 1, "pending_prompt_tokens": 77}.items() <= p["stage"].items()
        assert p["stage"]["age_s"] >= 0 and not {"instance", "incarnation"} & set(p["stage"])


async def test_prometheus_sees_the_load_of_those_who_report(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("P0", "D0") as c:
        incarnation = c.table.instance("P0").incarnation
        c.table.report(StageReport("P0", incarnation, 1, running=1, pending_prompt_tokens=77, kv_used=0.5))
        assert c.metric("epd_stage_load", instance="P0", role="P") == 77
        assert c.metric("epd_stage_kv_used", instance="P0", role="P") == 0.5
        assert c.metric("epd_stage_up", instance="D0", role="D") == 1
        assert 'epd_stage_kv_used{instance="D0"' not in (await c.client.get("/metrics")).text
        monkeypatch.setattr("proxy.registry.stage_metrics.REPORT_TRUST_S", -1.0)
        assert 'epd_stage_kv_used{instance="P0"' not in (await c.client.get("/metrics")).text


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="model name"):
        settings(served_models=())
    with pytest.raises(ConfigError, match="retries"):
        settings(retries=-1)
    for name, value in {"send_pixels": "sometimes", "on_missing_feature": "panic"}.items():
        with pytest.raises(ConfigError, match=f"unknown {name} '{value}'"):
            settings(**{name: value})
    with pytest.raises(ConfigError, match="total_s"):
        Timeouts(total_s=0)
    with pytest.raises(ConfigError, match="max_pixels"):
        MediaLimits(max_pixels=-1)


def test_importing_the_proxy_imports_no_engine_and_no_tensor_library() -> None:
    heavy = "{'torch', 'torch_npu', 'vllm', 'mooncake', 'transformers', 'numpy'}"
    code = f"import sys, proxy.http.app, proxy.server.uvicorn_server; print(sorted({heavy} & set(sys.modules)))"
    link_fields = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert link_fields.stdout.strip() == "[]"
