"""One simulated stage: what comes in by HTTP becomes sequences of the engine, what the engine makes becomes answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from epd_serve import __version__
from epd_serve.errors import ConfigError
from epd_serve.sim.engine import Engine
from epd_serve.sim.faults import SimFaults
from epd_serve.sim.http import Exchange
from epd_serve.sim.prompts import CHAT, COMPLETIONS, RESPONSES, prompts_of
from epd_serve.sim.request_lifecycle import RequestLifecycle
from epd_serve.sim.request_params import parse_params
from epd_serve.sim.tokens import text_of


class Stage:
    """Handles exchanges; `handle` is what the HTTP server calls.

    Args:
        lifecycle: what generates.
        key: bearer token that every path but /health wants; "" for none.
        takes_media: items may come with their media, not as metadata alone.
    """

    def __init__(
        self,
        engine: Engine,
        lifecycle: RequestLifecycle,
        faults: SimFaults,
        *,
        model: str,
        model_path: str,
        key: str = "",
        takes_media: bool = True,
    ) -> None:
        self._takes_media = takes_media
        self._engine, self._lifecycle, self._faults = engine, lifecycle, faults
        self._profile = engine.profile
        self._model = model
        self._model_path = model_path
        self._expected = f"Bearer {key}".encode() if key else b""
        self._created = int(time.time())
        self._posts: dict[str, Callable[[Exchange, dict[str, Any]], None]] = {
            CHAT: self._generate,
            COMPLETIONS: self._generate,
            RESPONSES: self._generate,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/sim/faults": self._change_faults,
        }
        self._gets: dict[str, Callable[[Exchange], None]] = {
            "/health": lambda exchange: exchange.respond(200),
            "/ping": lambda exchange: exchange.respond(200),
            "/version": lambda exchange: exchange.respond_json({"version": f"epd-sim {__version__}"}),
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/sim/faults": self._show_faults,
        }
        self.served = 0

    def handle(self, exchange: Exchange) -> None:
        """Answer, now or later. Never raises."""
        path, method = exchange.path, exchange.method
        if self._expected and path != "/health" and exchange.headers.get(b"authorization") != self._expected:
            exchange.refuse(401, "This stage answers its proxy only.", kind="authentication_error")
        elif method in ("GET", "HEAD") and path in self._gets:
            self._gets[path](exchange)
        elif path in self._posts and method == "POST":
            self._post(exchange)
        elif path in self._gets or path in self._posts:
            exchange.respond_json({"detail": "Method Not Allowed"}, 405)
        else:
            exchange.respond_json({"detail": "Not Found"}, 404)

    def _post(self, exchange: Exchange) -> None:
        try:
            body = msgspec.json.decode(exchange.body)
            if not isinstance(body, dict):
                raise ValueError("the body has to be an object")
            if (model := body.get("model")) not in (None, self._model):
                exchange.refuse(404, f"The model `{model}` does not exist.", param="model")
                return
            self._posts[exchange.path](exchange, body)
        except ValueError as error:  # msgspec's are ValueErrors
            exchange.refuse(400, str(error))

    # --- generation -----------------------------------------------------------------------------------------------

    def _generate(self, exchange: Exchange, body: dict[str, Any]) -> None:
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        params = parse_params(exchange.path, body, given or uuid.uuid4().hex, self._model, self._profile)
        if not self._takes_media and any(item.has_media for prompt in params.prompts for item in prompt.items):
            raise ValueError("At most 0 media items may be provided in one prompt.")
        state = self._faults.state
        self._faults.swallow(exchange.body)
        if state.refuse:
            exchange.refuse(503, "this simulated stage refuses on demand")
        elif self._faults.hits(state.error_rate):
            exchange.refuse(state.error_status, "this simulated stage fails on demand")
        else:
            self.served += 1
            self._lifecycle.run(params, exchange)

    # --- failures on demand ---------------------------------------------------------------------------------------

    def _show_faults(self, exchange: Exchange) -> None:
        exchange.respond_json(self._faults.as_dict())

    def _change_faults(self, exchange: Exchange, body: dict[str, Any]) -> None:
        try:
            self._faults.change(body)
        except ConfigError as error:
            exchange.refuse(400, str(error), param=error.param)
            return
        self._show_faults(exchange)

    # --- the rest of vLLM's server ----------------------------------------------------------------------------------

    def _models(self, exchange: Exchange) -> None:
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "vllm"}
        card |= {"root": self._model_path, "parent": None, "max_model_len": self._profile.capacity.max_model_len}
        exchange.respond_json({"object": "list", "data": [{**card, "permission": []}]})

    def _metrics(self, exchange: Exchange) -> None:
        text = _metrics_text(self._engine, self._model, served=self.served)
        exchange.respond(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, exchange: Exchange, body: dict[str, Any]) -> None:
        (prompt, *more) = prompts_of("", body, self._profile.item_tokens)
        if more:
            raise ValueError("prompt has to be one text")
        ids = prompt.ids
        strs = [text_of([one]) for one in ids] if body.get("return_token_strs") else None
        limit = self._profile.capacity.max_model_len
        exchange.respond_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strs})

    def _detokenize(self, exchange: Exchange, body: dict[str, Any]) -> None:
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ValueError("tokens has to be a list of token ids")
        exchange.respond_json({"prompt": text_of(ids)})


def _metrics_text(engine: Engine, model: str, *, served: int) -> str:
    """Prometheus text: those of vLLM's names that say how busy the stage is. `served`: requests that have begun."""
    scheduler = engine.scheduler
    used = 1 - scheduler.free_blocks / scheduler.blocks if scheduler.blocks else 0.0
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    gauges = {
        "vllm:num_requests_running": len(scheduler.running),
        "vllm:num_requests_waiting": len(scheduler.waiting) + len(scheduler.held),
        "vllm:kv_cache_usage_perc": used,
    }
    counters = {
        "vllm:num_preemptions_total": scheduler.preemptions,
        "vllm:prefix_cache_queries_total": scheduler.asked_tokens,
        "vllm:prefix_cache_hits_total": scheduler.cached_tokens,
        "epd_sim:requests_total": served,
        "epd_sim:steps_total": engine.steps,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, value in values.items():
            lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="{label}"}} {value}']
    return "\n".join(lines) + "\n"
