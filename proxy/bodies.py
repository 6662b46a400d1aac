"""The bodies that each stage gets, made from one client body. Pure. With which media is `proxy/delivery.py`'s choice.

E sees only its share of the items; D sees the client's request; P sees the same prompt but is asked for one token,
so that its answer costs nothing. Whatever can change the prompt is kept in both, or P's KV would not fit D's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from epd_serve.instances import Instance
from epd_serve.wire import ENCODE_AGAIN_XARG
from proxy.directory import Metadata
from proxy.media import LoadedItem
from proxy.parts import placeholder_part, rewritten_part
from proxy.request import ParsedRequest

# Concern sampling or the form of the answer, never the prompt. `response_format`, `tools` and `tool_choice` stay:
# some renderers (Kimi-K3, harmony) write them into the prompt.
NOT_FOR_PREFILL = frozenset({
    "stream_options", "stream_interval", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "logprobs", "top_logprobs", "logprob_token_ids", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
    "return_token_ids", "return_prompt_text", "repetition_detection", "thinking_token_budget",
})  # fmt: skip
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")


def base_body(request: ParsedRequest, items: Sequence[LoadedItem], cache_salt: str | None) -> dict[str, Any]:
    """The client's body with every media item loaded, keyed and inlined, and the tenant's salt."""
    body = _with_parts(
        request.body, items, lambda item, part: rewritten_part(part, item.ref, source=item.source, uuid=item.key)
    )
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def placeholder_body(
    base: Mapping[str, Any], items: Sequence[LoadedItem], metadata: Mapping[str, Metadata]
) -> dict[str, Any]:
    """`base` with every item's metadata in place of its media. `metadata` has all of their keys."""
    return _with_parts(base, items, lambda item, _: placeholder_part(item.ref, metadata[item.key], uuid=item.key))


def renamed_body(base: Mapping[str, Any], items: Sequence[LoadedItem]) -> dict[str, Any]:
    """`base` with its media under names that are not those of any feature (`media_name`)."""
    return _with_parts(base, items, lambda item, part: {**part, "uuid": media_name(item.key)})


def media_name(key: str) -> str:
    """Another name for the item of `key`, the same one every time."""
    return hashlib.sha256(b"epd-serve/media/" + key.encode()).hexdigest()


def with_xargs(base: Mapping[str, Any], **words: str) -> dict[str, Any]:
    """`base` with words for the connectors of the stage, beside the client's own `vllm_xargs`."""
    return {**base, "vllm_xargs": {**(base.get("vllm_xargs") or {}), **words}}


def encode_body(base: Mapping[str, Any], items: Iterable[LoadedItem], again: Collection[str] = ()) -> dict[str, Any]:
    """A chat request of media parts only. The answer's text is of no interest.

    Args:
        again: keys that the encoder must encode even where it believes that they are there.
    """
    parts = [base["messages"][item.ref.message]["content"][item.ref.part] for item in items]
    kept = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt")
    body = {
        "model": base["model"],
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
        "stream": False,
        **{name: base[name] for name in kept if base.get(name) is not None},
    }
    return with_xargs(body, **{ENCODE_AGAIN_XARG: ",".join(sorted(again))}) if again else body


def prefill_body(base: Mapping[str, Any], transfer_id: str, prefill: Instance) -> dict[str, Any]:
    """The same prompt, one token, no frills. `n` and prompt lists stay: transfers are keyed (id, child)."""
    body = {name: value for name, value in base.items() if name not in NOT_FOR_PREFILL}
    params = {"transfer_id": transfer_id, "incarnation": prefill.incarnation}
    return {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}


def decode_body(base: Mapping[str, Any], transfer_id: str, prefill: Instance) -> dict[str, Any]:
    """The client's request, and where its KV comes from."""
    peer = {"instance": prefill.id, "incarnation": prefill.incarnation, "endpoint": prefill.kv_endpoint}
    return {**base, "kv_transfer_params": {"transfer_id": transfer_id, "peer": peer}}


def public_answer(answer: Mapping[str, Any], *, keep_token_ids: bool) -> dict[str, Any]:
    """A stage's JSON answer without what only stages may see. Prompt token ids stay if the client asked for them."""
    internal = INTERNAL_FIELDS if keep_token_ids else (*INTERNAL_FIELDS, "prompt_token_ids")
    return {name: value for name, value in answer.items() if name not in internal}


def _with_parts(
    body: Mapping[str, Any],
    items: Sequence[LoadedItem],
    rewritten: Callable[[LoadedItem, Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """A copy of `body` with the part of every item rewritten."""
    if not items:
        return dict(body)
    messages = list(body["messages"])
    for item in items:
        ref = item.ref
        content = list(messages[ref.message]["content"])
        content[ref.part] = rewritten(item, content[ref.part])
        messages[ref.message] = {**messages[ref.message], "content": content}
    return {**body, "messages": messages}
