"""What becomes of every field that a client may send, each with its reason, and the sieve that holds bodies to it.

A field of vLLM's requests is passed on, set by the proxy alone, refused by name, or ignored. All others are unknown:
left out and counted, or refused in strict mode. Which fields there are is `proxy/fields/vllm_fields.py`'s, read from
the wheels: `make check` names one that nobody judged.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from epd_serve.errors import RequestError
from proxy.fields.vllm_fields import FIELDS, RELEASES, TYPES
from proxy.strict_json import SHOWN_CHARS


class Refusal(NamedTuple):
    """Why a field is answered with 400. `harmless`: values, beside null, that ask for nothing and are left out."""

    reason: str
    harmless: tuple[Any, ...] = ()


_OURS = Refusal("is set by the server and cannot be sent by a client.")
_NO_MEMORY = "is not supported: this server keeps no responses; "
_GUIDED = Refusal("is gone from vLLM, which would answer unconstrained; use structured_outputs or response_format.")
_FUNCTIONS = Refusal("is OpenAI's old form and unknown to vLLM; use tools and tool_choice.", ([],))
_MEDIA_OPTIONS = Refusal(
    "changes what an image costs to preprocess, without a bound, so it is taken from trusted clients only: "
    "--proxy trust_request_mm_kwargs=true.",
    ({},),
)

PASSED = {
    "the request itself": "model messages prompt input instructions tokens stream stream_options n",
    "length, which the engine and its KV bound": (
        "max_tokens max_completion_tokens max_output_tokens min_tokens truncate_prompt_tokens truncation_side "
        "truncation thinking_token_budget"
    ),
    "sampling: numbers that vLLM checks before they reach the engine": (
        "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias stop "
        "stop_token_ids ignore_eos allowed_token_ids bad_words repetition_detection use_beam_search length_penalty "
        "watermarking"
    ),
    "form of the answer": (
        "logprobs top_logprobs logprob_token_ids prompt_logprobs echo suffix include include_reasoning "
        "include_stop_str_in_output skip_special_tokens spaces_between_special_tokens return_token_ids "
        "return_tokens_as_token_ids return_prompt_text return_token_strs enable_response_messages stream_interval text"
    ),
    "grammars, which vLLM compiles and refuses before the engine": "response_format structured_outputs",
    "tools are text in the prompt; builtin ones need a tool server that only the operator can name": (
        "tools tool_choice parallel_tool_calls max_tool_calls"
    ),
    "variables of the chat template: text, and vLLM filters what the template does not know": (
        "add_generation_prompt continue_final_message add_special_tokens documents chat_template_kwargs "
        "reasoning_effort reasoning"
    ),
    "Jinja code of a client: both generations refuse it, unless the operator gives --trust-request-chat-template": (
        "chat_template"
    ),
    "read by nobody, or written back into the answer": "user metadata service_tier prompt_cache_key",
    "judged by the queues in front of the stages; what reaches a stage is the proxy's own": "priority",
    "an object of words for the operator's own extensions, who says which names it may have": "vllm_xargs",
}
"""Reason → names, for all endpoints whose vLLM model has them."""

REFUSED = {
    # An engine that believes them waits for, or takes, KV and features of others; a wrong type kills it.
    "kv_transfer_params": _OURS,
    "ec_transfer_params": _OURS,
    "uuid": _OURS,  # names a feature: another tenant's
    "mm_hashes": _OURS,
    "cache_salt": _OURS,  # another tenant's would probe what it sent
    "request_id": _OURS,  # two of one name: the engine aborts both, or the wrong one
    "data_parallel_rank": _OURS,  # picks an engine, past the router
    "prompt_embeds": Refusal("is not accepted from clients: it is a tensor that reaches the engine unchecked."),
    "mm_processor_kwargs": _MEDIA_OPTIONS,  # {"size": 1e6} takes the memory of the stage's front end
    "media_io_kwargs": _MEDIA_OPTIONS,  # frames and decoders of videos
    "logits_processors": Refusal("names code to be loaded; load it with the stage (--logits-processors).", ([],)),
    "routed_experts_prompt_start": Refusal("is not supported: experts of a prompt stay where it was prefilled.", (0,)),
    # What would need a memory that stages do not have: the next request may meet another one.
    "store": Refusal(_NO_MEMORY + "send store: false, or leave it out.", (False,)),
    "background": Refusal(_NO_MEMORY + "wait for the answer, or stream it.", (False,)),
    "previous_response_id": Refusal(_NO_MEMORY + "send the earlier items in input."),
    "conversation": Refusal(_NO_MEMORY + "send the earlier items in input."),
    "previous_input_messages": Refusal("is not supported: send the earlier items in input."),
    "response.prompt": Refusal(_NO_MEMORY + "send instructions and input."),
    # What vLLM would pass over in silence, and answer something else than was asked.
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "best_of": Refusal("is gone from vLLM; ask for n answers.", (1,)),
    "audio": Refusal("is not supported: this server answers with text."),
    "modalities": Refusal("can be text only.", (["text"],)),
    "web_search_options": Refusal("is not supported: this server searches nothing."),
}
"""Name, or `response.` and name → why. On every endpoint, whether its vLLM knows the field or not."""

IGNORED = {
    "of vLLM's render endpoints, nothing elsewhere": "mm_payload return_mm_kwargs return_token_offsets",
    "groups requests by a name that two tenants may share; the router knows its own": "session_id",
    "what to mask in training; nothing reads it in an answer": "return_assistant_tokens_mask",
    "OpenAI's, about its accounts, caches and speed: the answer is the same": (
        "safety_identifier prompt_cache_retention prompt_cache_options prediction moderation user metadata "
        "service_tier prompt_cache_key stream_options access_programs guided_decoding_backend guided_whitespace_pattern"
    ),
}
"""Reason → names that are left out without a word, in strict mode too: clients of OpenAI send them.

Of a name that is in `PASSED`, too, this is the fallback: it goes on where the endpoint's vLLM model has it, and is left
out where that has not."""

XARGS_REFUSED = frozenset({
    "kv_transfer_params", "ec_transfer_params", "request_id", "cache_salt", "uuid", "mm_hashes",
    "kv_cache_report_mode",  # `full` floods the KV events
})  # fmt: skip
"""Names in `vllm_xargs`, which vLLM merges with words of its own. Names that begin with `OUR_XARGS` are the proxy's
words."""
OUR_XARGS = "epd_"

TEMPLATE_KWARGS_REFUSED = frozenset(
    "chat_template conversation messages tools model_config tokenizer tokenize padding truncation max_length "
    "return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Names in `chat_template_kwargs` that vLLM hands on as a parameter of the tokenizer's own `apply_chat_template`, not
as a variable of the template. `tokenize` and `padding` with a `max_length` make a prompt of a billion tokens; the rest
would take the place of what was checked. Its other parameters are variables: documents, add_generation_prompt,
continue_final_message."""

_TOOL = "type function name description parameters strict defer_loading"
_PART = "type text image_url audio_url video_url input_audio refusal thinking closed name detail"
_JUDGED_PARTS = "uuid image_pil image_embeds audio_embeds video_embeds prompt_embeds data file_id"
_CHAT = {
    "messages": (
        "role content name tool_calls tool_call_id function_call refusal reasoning reasoning_content tools task"
    ),
    "messages.content": f"{_PART} {_JUDGED_PARTS}",  # the second by proxy/fields/parts.py, which refuses them
    "messages.content.image_url": "url detail",
    "messages.content.audio_url": "url",
    "messages.content.video_url": "url",
    "messages.content.input_audio": "data format",
    "messages.tool_calls": "id type index function custom",
    "tools": _TOOL,
    "tools.function": "name description parameters strict defer_loading",
}
_ANSWER = {
    "stream_options": "include_usage continuous_usage_stats include_obfuscation",
    "structured_outputs": (
        "json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties "
        "whitespace_pattern"
    ),
    "repetition_detection": "max_pattern_size min_pattern_size min_count",
    "response_format": "type json_schema format structures triggers",
    "response_format.json_schema": "name description schema strict",
    "response_format.structures": "begin schema end",
}
_INPUT = (
    "type role content output id call_id name arguments status summary encrypted_content namespace phase input action "
    "queries results server_label error approval_request_id approve reason code container_id outputs tools"
)
_RESPONSE = {
    "input": _INPUT,
    "input.content": f"{_PART} {_JUDGED_PARTS} annotations logprobs",
    "input.output": f"{_PART} {_JUDGED_PARTS}",
    # No server_url, connector_id, authorization, headers: a stage opens no connection that a client names.
    "tools": (
        f"{_TOOL} format tools container server_label server_description allowed_tools require_approval filters "
        "search_context_size user_location output_schema"
    ),
}
NESTED: dict[str, dict[str, str]] = {
    "chat": {**_CHAT, **_ANSWER},
    "completion": _ANSWER,
    "response": {**_RESPONSE, **_ANSWER},
    "tokenize_text": {},
    "tokenize_chat": _CHAT,
    "detokenize": {},
}
"""Model → path of an object, or of a list of them → the names that it may have. What has no path passes whole: it is
data (a JSON schema, template variables), or vLLM's own model of it is closed."""

ANTHROPIC = (
    "model messages max_tokens system stream stop_sequences temperature top_p top_k tools tool_choice thinking "
    "output_config chat_template_kwargs vllm_xargs watermarking priority"
)
_BLOCK = "type text citations cache_control source"
_SOURCE = "type media_type data url file_id"
NESTED_ANTHROPIC = {
    "system": "type text citations cache_control",
    "messages": "role content",
    "messages.content": (
        f"{_BLOCK} id name input caller tool_use_id content is_error thinking signature data title context"
    ),
    "messages.content.source": _SOURCE,
    "messages.content.content": f"{_BLOCK} tool_name",
    "messages.content.content.source": _SOURCE,
    "tools": (
        "type name description input_schema strict defer_loading cache_control allowed_callers "
        "eager_input_streaming input_examples"
    ),
    "tool_choice": "type name disable_parallel_tool_use",
    "thinking": "type budget_tokens display",
    "output_config": "effort format",
    "output_config.format": "type schema",
}
"""The same for `/v1/messages`, whose fields are Anthropic's: what `proxy/fields/messages.py` makes a chat of, and what
it may pass over, as it changes no answer."""


def names_of(groups: dict[str, str]) -> frozenset[str]:
    """All names of a table of reasons."""
    return frozenset(name for names in groups.values() for name in names.split())


OTHER = "other"
MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that a client may send once the operator trusts clients with them."""
MESSAGES_MODEL = "messages"
"""What `rules_of` calls a body of `/v1/messages`, before a chat is made of it."""


class Level(NamedTuple):
    """What an object may have.

    Attributes:
        allowed: names. inner: those below which there is another level.
        types: letters (`proxy/fields/vllm_fields.py`) of the names for which a list or an object is taken.
    """

    allowed: frozenset[str]
    types: Mapping[str, str]
    inner: Mapping[str, Level]


class Rules(NamedTuple):
    """The rules of one of vLLM's models, in one of its releases."""

    top: Level
    refused: Mapping[str, Refusal]


@functools.cache
def rules_of(model: str, release: str = "", *, media_options: bool = False) -> Rules:
    """Returns the rules for `model`, a key of `FIELDS` or `MESSAGES_MODEL`.

    Args:
        release: vLLM's version; one between two that were read counts as the older of them. Empty, or older than all:
            what any of them has, for stages of unknown versions. Nothing that is refused is among it.
        media_options: `MEDIA_OPTIONS` pass.
    """
    trusted = MEDIA_OPTIONS if media_options else ()
    refused = {name: why for name, why in REFUSED.items() if "." not in name and name not in trusted}
    if model == MESSAGES_MODEL:
        return Rules(_level(NESTED_ANTHROPIC, {}, "", frozenset(ANTHROPIC.split())), refused)
    refused |= {name.removeprefix(f"{model}."): why for name, why in REFUSED.items() if name.startswith(f"{model}.")}
    releases = FIELDS[model]
    fields = releases.get(known_release(release)) or frozenset().union(*releases.values())
    allowed = (fields & names_of(PASSED).union(trusted)) - refused.keys()
    return Rules(_level(NESTED[model], TYPES[model], "", allowed), refused)


def known_release(version: str) -> str:
    """The newest release read that is not newer than `version`, "" where there is none."""
    return next((release for release in reversed(RELEASES) if _numbers(release) <= _numbers(version)), "")


class Sieve(Struct):
    """Sifts one body, in place.

    Attributes:
        strict: an unknown field is an error.
        dropped: what was left out, by words that are few: names of fields that vLLM has, paths, `other`.
    """

    strict: bool
    dropped: list[str] = []

    def body(self, body: dict[str, Any], rules: Rules) -> None:
        """Leave in `body` what may reach a stage.

        Raises:
            RequestError: 400, naming the field that is refused, of a type that vLLM does not take, or in strict mode
                unknown.
        """
        self._sift(body, rules.top, (), rules.refused)

    def xargs(self, xargs: dict[str, Any], allowed: Collection[str]) -> None:
        """The same for `vllm_xargs`, of which only what the operator names reaches an engine."""
        for name, value in xargs.items():
            ours = name in XARGS_REFUSED or name.startswith(OUR_XARGS)
            if ours and value is not None and name not in allowed:
                where = f"vllm_xargs.{name}"
                raise RequestError(f"{where} is set by the server and cannot be sent by a client.", param=where)
        self._sift(xargs, Level(frozenset(allowed), {}, {}), ("vllm_xargs",), _NONE)

    def _sift(
        self, body: dict[str, Any], level: Level, where: tuple[str | int, ...], refused: Mapping[str, Refusal]
    ) -> None:
        """One object. `where`: names and indices that lead to it; they are put into words where something is wrong."""
        if not body.keys() <= level.allowed:
            for name in [name for name in body if name not in level.allowed]:
                self._judge(body.pop(name), level, (*where, name), refused)
        types, inner = level.types, level.inner
        for name, value in body.items():
            kind, letters, below = type(value), types.get(name), inner.get(name)
            if letters is not None and _LETTERS[kind].isdisjoint(letters):
                raise _mistyped((*where, name), letters)
            if below is not None and kind is dict:
                self._sift(value, below, (*where, name), _NONE)
            elif kind is list and (below is not None or letters == "L"):
                for number, one in enumerate(value):
                    if type(one) is not dict:
                        if letters == "L":
                            raise _mistyped((*where, name, number), "o")
                    elif below is not None:
                        self._sift(one, below, (*where, name, number), _NONE)

    def _judge(self, value: object, level: Level, where: tuple[str | int, ...], refused: Mapping[str, Refusal]) -> None:
        """What no level allows."""
        name = str(where[-1])
        if value is None or (len(where) == 1 and name not in refused and name in _IGNORED):
            return
        if (refusal := refused.get(name)) is not None:
            if value not in refusal.harmless:
                raise RequestError(f"{name} {refusal.reason}", param=name)
            return
        shown = _path(where)[:SHOWN_CHARS]
        if name.endswith("_embeds"):  # tensors; those that have a place in a part, `proxy/fields/parts.py` refuses
            raise RequestError(f"{shown} is not accepted from clients.", param=shown)
        if self.strict:
            near = difflib.get_close_matches(name[:SHOWN_CHARS], sorted(level.allowed), n=1, cutoff=0.6)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(
                f"{shown} is not a field that this server knows{meant}", param=shown, code="unknown_field"
            )
        place = ".".join(one for one in where[:-1] if isinstance(one, str))
        self.dropped.append(place or (name if name in _NAMED else OTHER))


def _path(where: tuple[str | int, ...]) -> str:
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in where)[1:]


def _mistyped(where: tuple[str | int, ...], letters: str) -> RequestError:
    path = _path(where)
    return RequestError(f"{path} must be {' or '.join(_WORDS[one] for one in letters)}.", param=path)


def _level(nested: Mapping[str, str], types: Mapping[str, str], prefix: str, allowed: frozenset[str]) -> Level:
    """`prefix`: of the paths in the tables that lead here, with its point."""
    return Level(
        allowed,
        {name: types[prefix + name] for name in allowed if prefix + name in types},
        {
            name: _level(nested, types, f"{prefix}{name}.", frozenset(nested[prefix + name].split()))
            for name in allowed
            if prefix + name in nested
        },
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


_WORDS = {"o": "an object", "l": "a list", "L": "a list", "s": "a string", "n": "a number"}
_LETTERS: dict[type, frozenset[str]] = {
    dict: frozenset("o"),
    list: frozenset("lL"),
    str: frozenset("s"),
    int: frozenset("n"),
    float: frozenset("n"),
    bool: frozenset("n"),
    type(None): frozenset("lLosn"),
}
_NONE: dict[str, Refusal] = {}
_IGNORED = names_of(IGNORED)
_NAMED = frozenset().union(names_of(PASSED), *(names for model in FIELDS.values() for names in model.values()))
