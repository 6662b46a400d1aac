"""What a plain vLLM answers and this server does not, by path: why, and what would serve it.

Paths that are in neither list, and none of ours, are nobody's.
"""

from __future__ import annotations

from typing import NamedTuple

from epd_serve.errors import NotFoundError


class Unserved(NamedTuple):
    """Attributes: paths: of vLLM 0.32. why: it is not served here. instead: what serves it."""

    paths: tuple[str, ...]
    why: str
    instead: str


PLAIN = "`vllm serve` beside this server"
UNSERVED = (
    Unserved(
        ("/cohere/v2/chat",),
        "it asks in another form than OpenAI's and Anthropic's",
        "`/v1/chat/completions` or `/v1/messages` here, in every layout; " + PLAIN,
    ),
    Unserved(
        (
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ),
        "models that answer without decoding have nothing to disaggregate",
        PLAIN,
    ),
    Unserved(
        ("/v1/audio/transcriptions", "/v1/audio/translations"),
        "models of encoder and decoder keep state that no stage hands over",
        "`/v1/chat/completions` here with `input_audio`, for models that take it in chats; " + PLAIN,
    ),
    Unserved(
        ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        "no response is kept: each request may go to other instances",
        "`/v1/responses` here with the whole conversation as `input`",
    ),
    Unserved(
        (
            "/v1/chat/completions/batch",
            "/v1/chat/completions/render",
            "/v1/chat/completions/derender",
            "/v1/completions/render",
            "/v1/completions/derender",
            "/v1/messages/render",
            "/v1/responses/render",
            "/inference/v1/generate",
            "/generative_scoring",
            "/v1/systemone",
            "/invocations",
        ),
        "it speaks with one engine about its tokens or its inner forms",
        "`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` and `/tokenize` here; " + PLAIN,
    ),
    Unserved(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "neither a prompt's hash nor a feature's key says which adapter computed it",
        PLAIN,
    ),
    Unserved(
        (
            "/abort_requests",
            "/collective_rpc",
            "/fault_tolerance/apply",
            "/fault_tolerance/status",
            "/finish_weight_update",
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_scaling_elastic_ep",
            "/is_sleeping",
            "/kv_event_sources",
            "/load",
            "/pause",
            "/ping",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/tokenizer_info",
            "/update_weight_version",
            "/update_weights",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        ),
        "it is for who runs one engine, and nothing for clients",
        "`epd-serve status`, `drain`, `restart`, `relayout` and the admin listener",
    ),
)


def unserved(path: str) -> NotFoundError | None:
    """The answer to a request for this path; None where vLLM has no such path either."""
    for group in UNSERVED:
        if any(_matches(path, one) for one in group.paths):
            return NotFoundError(f"{path} is not served: {group.why}. Use {group.instead}.", code="not_served")
    return None


def _matches(path: str, known: str) -> bool:
    parts, wanted = path.rstrip("/").split("/"), known.split("/")
    return len(parts) == len(wanted) and all(
        one == other or other.startswith("{") for one, other in zip(parts, wanted, strict=True)
    )
