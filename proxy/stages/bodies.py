"""The bodies that each stage gets, made from one client body. Pure. With which media is `proxy/generate/recovery.py`'s
choice.

E sees only its share of the items; D sees the client's request; P sees the same prompt but is asked for one token,
so that its answer costs nothing. Whatever can change the prompt is kept in both, or P's KV would not fit D's tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from epd_serve.instances import Instance
from epd_serve.wire import ENCODE_AGAIN_XARG, FIRST_TOKEN, GOES_ON_AFTER, PROMPT_XARG, REPLAY
from proxy.fields.parts import as_chat_part, placeholder_part, rewritten_part
from proxy.media.loader import LoadedItem
from proxy.registry.feature_directory import Metadata
from proxy.request.parse import Endpoint, ParsedRequest

# Concern sampling or the form of the answer, never the prompt. `response_format`, `tools` and `tool_choice` stay:
# some renderers (Kimi-K3, harmony) write them into the prompt.
NOT_FOR_PREFILL = frozenset({
    "stream_options", "stream_interval", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "logprobs", "top_logprobs", "logprob_token_ids", "structured_outputs", "return_token_ids", "return_prompt_text",
    "repetition_detection", "thinking_token_budget", "include", "enable_response_messages", "max_tool_calls",
})  # fmt: skip
RESPONSE_ID = "resp_"
"""What OpenAI's and vLLM's ids of responses begin with."""
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")


def base_body(
    request: ParsedRequest, items: Sequence[LoadedItem], cache_salt: str | None, *, request_id: str = ""
) -> dict[str, Any]:
    """The client's body with every media item loaded, keyed and inlined, and the tenant's salt.

    Args:
        request_id: named in the body where vLLM heeds no header: its Responses. There nothing is stored either: what
            one stage keeps, the next request would not find.
    """
    body = _with_parts(request.body, items, _rewritten)
    if request.endpoint is Endpoint.RESPONSES:
        body |= {"request_id": RESPONSE_ID + request_id, "store": False}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def inlined_body(request: ParsedRequest, items: Sequence[LoadedItem]) -> dict[str, Any]:
    """The client's body with every media item loaded and inlined, under no name."""

    def unnamed(item: LoadedItem, part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in _rewritten(item, part).items() if name != "uuid"}

    return _with_parts(request.body, items, unnamed)


def placeholder_body(
    base: Mapping[str, Any], items: Sequence[LoadedItem], metadata: Mapping[str, Metadata]
) -> dict[str, Any]:
    """`base` with every item's metadata in place of its media. `metadata` has all of their keys."""
    return _with_parts(base, items, lambda item, _: placeholder_part(item.ref, metadata[item.key], uuid=item.key))


def renamed_body(base: Mapping[str, Any], items: Sequence[LoadedItem]) -> dict[str, Any]:
    """`base` with its media under names that are not those of any feature (`media_name`). Its KV is then not that of
    the prompt with these nodes, which the stage is not told."""
    if PROMPT_XARG in (xargs := base.get("vllm_xargs") or {}):
        base = {**base, "vllm_xargs": {name: word for name, word in xargs.items() if name != PROMPT_XARG}}
    return _with_parts(base, items, lambda item, part: {**part, "uuid": media_name(item.key)})


def media_name(key: str) -> str:
    """Another name for the item of `key`, the same one every time."""
    return hashlib.sha256(b"epd-serve/media/" + key.encode()).hexdigest()


def with_xargs(base: Mapping[str, Any], **xargs: str) -> dict[str, Any]:
    """`base` with words for the connectors of the stage, beside the client's own `vllm_xargs`."""
    return {**base, "vllm_xargs": {**(base.get("vllm_xargs") or {}), **xargs}}


def encode_body(base: Mapping[str, Any], items: Iterable[LoadedItem], again: Collection[str] = ()) -> dict[str, Any]:
    """A chat request of media parts only. The answer's text is of no interest.

    Args:
        items: each under its own key, which may be that of a part of it.
        again: keys that the encoder must encode even where it believes that they are there.
    """
    parts = [
        {**as_chat_part(base[ref.messages][ref.message][ref.parts][ref.part], ref), "uuid": item.key}
        for item in items
        for ref in (item.ref,)
    ]
    copied_fields = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt")
    body = {
        "model": base["model"],
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
        "stream": False,
        **{name: base[name] for name in copied_fields if base.get(name) is not None},
    }
    return with_xargs(body, **{ENCODE_AGAIN_XARG: ",".join(sorted(again))}) if again else body


class After(NamedTuple):
    """What an answer goes on after: ids of its tokens so far. `replay`: they are sampled again, where it is decoded."""

    tokens: Sequence[int]
    replay: bool

    @property
    def params(self) -> dict[str, Any]:
        """For who decodes, in `kv_transfer_params`."""
        return {GOES_ON_AFTER: list(self.tokens), **({REPLAY: True} if self.replay else {})}


def with_ids(base: Mapping[str, Any]) -> dict[str, Any]:
    """`base`, answered with ids of the tokens."""
    return {**base, "return_token_ids": True}


def fused_body(base: Mapping[str, Any], after: After) -> dict[str, Any]:
    """The client's request for who prefills and decodes, to go on with its answer."""
    return {**base, "kv_transfer_params": after.params}


def prefill_body(
    base: Mapping[str, Any],
    transfer_id: str,
    prefill: Instance,
    endpoint: Endpoint = Endpoint.CHAT,
    after: After | None = None,
) -> dict[str, Any]:
    """The same prompt, one token, no frills. `n` and prompt lists stay: transfers are keyed (id, child).

    Args:
        after: tokens of the answer that D is to go on after; part of the prompt but for a replay.
    """
    body = {name: value for name, value in base.items() if name not in NOT_FOR_PREFILL}
    limit = "max_output_tokens" if endpoint is Endpoint.RESPONSES else "max_tokens"
    more = after.params if after is not None and not after.replay else {}
    return {**body, "stream": False, limit: 1, "kv_transfer_params": _sent(transfer_id, prefill, more)}


def first_token_body(base: Mapping[str, Any], transfer_id: str, prefill: Instance) -> dict[str, Any]:
    """The client's request for a stream, as far as its first token: all that can shape that one stays."""
    params = _sent(transfer_id, prefill, {FIRST_TOKEN: True})
    body = {**base, "max_tokens": 1, "kv_transfer_params": params}
    body.pop("max_completion_tokens", None)
    if body.get("min_tokens"):
        body["min_tokens"] = 1  # more than `max_tokens` would be refused
    return body


def decode_body(
    base: Mapping[str, Any],
    transfer_id: str,
    prefill: Instance,
    *,
    first_token: bool = False,
    after: After | None = None,
) -> dict[str, Any]:
    """The client's request, and where its KV comes from.

    Args:
        first_token: it goes on after the one that P will say. after: it goes on after these.
    """
    peer = {"instance": prefill.id, "incarnation": prefill.incarnation, "endpoint": prefill.kv_endpoint}
    goes_on: dict[str, Any] = {FIRST_TOKEN: True} if first_token else after.params if after is not None else {}
    return {**base, "kv_transfer_params": {"transfer_id": transfer_id, "peer": peer, **goes_on}}


def _sent(transfer_id: str, prefill: Instance, more: Mapping[str, Any]) -> dict[str, Any]:
    """What P is to send its KV for."""
    return {"transfer_id": transfer_id, "incarnation": prefill.incarnation, **more}


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
    name = items[0].ref.messages  # one body, one list of messages
    messages = list(body[name])
    for item in items:
        ref = item.ref
        parts = list(messages[ref.message][ref.parts])
        parts[ref.part] = rewritten(item, parts[ref.part])
        messages[ref.message] = {**messages[ref.message], ref.parts: parts}
    return {**body, name: messages}


def _rewritten(item: LoadedItem, part: Mapping[str, Any]) -> Mapping[str, Any]:
    return rewritten_part(part, item.ref, source=item.source, uuid=item.key)
