"""The fields of vLLM's requests, by model and release. Written by `make npu-contract` from the released wheels.

A name stands for all releases; `name@A..B` for those from A to B.
"""

from __future__ import annotations

RELEASES = ("0.23.0", "0.26.0", "0.28.0", "0.32.0")

_SPECS = {
    "chat": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params@0.26.0..0.32.0 echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids@0.26.0..0.32.0 logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p
        min_tokens mm_payload@0.32.0..0.32.0 mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
        prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id response_format
        return_assistant_tokens_mask@0.26.0..0.28.0 return_mm_kwargs@0.32.0..0.32.0 return_prompt_text
        return_token_ids return_token_offsets@0.26.0..0.32.0 return_tokens_as_token_ids
        routed_experts_prompt_start@0.28.0..0.32.0 seed session_id@0.28.0..0.32.0 skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval@0.28.0..0.32.0 stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking@0.32.0..0.32.0
    """,
    "completion": """
        add_special_tokens allowed_token_ids bad_words@0.26.0..0.32.0 cache_salt ec_transfer_params@0.26.0..0.32.0
        echo frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids@0.26.0..0.32.0 logprobs max_tokens min_p min_tokens mm_payload@0.32.0..0.32.0 model n
        presence_penalty priority prompt prompt_embeds prompt_logprobs repetition_detection repetition_penalty
        request_id response_format return_mm_kwargs@0.32.0..0.32.0 return_token_ids
        return_token_offsets@0.26.0..0.32.0 return_tokens_as_token_ids routed_experts_prompt_start@0.28.0..0.32.0 seed
        session_id@0.28.0..0.32.0 skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
        stream_interval@0.28.0..0.32.0 stream_options structured_outputs suffix temperature thinking_token_budget
        top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking@0.32.0..0.32.0
    """,
    "response": """
        background cache_salt chat_template_kwargs ec_transfer_params@0.26.0..0.32.0 enable_response_messages
        frequency_penalty ignore_eos include include_reasoning@0.26.0..0.32.0 include_stop_str_in_output input
        instructions kv_transfer_params logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata
        min_p@0.32.0..0.32.0 mm_payload@0.32.0..0.32.0 mm_processor_kwargs model parallel_tool_calls presence_penalty
        previous_input_messages previous_response_id priority prompt prompt_cache_key reasoning repetition_penalty
        request_id return_mm_kwargs@0.32.0..0.32.0 seed service_tier session_id@0.28.0..0.32.0 skip_special_tokens
        stop stop_token_ids@0.32.0..0.32.0 store stream structured_outputs temperature text tool_choice tools top_k
        top_logprobs top_p truncation user vllm_xargs watermarking@0.32.0..0.32.0
    """,
    "tokenize_text": """
        add_special_tokens model prompt return_token_strs
    """,
    "tokenize_chat": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model return_token_strs tools
    """,
    "detokenize": """
        model tokens
    """,
}

_TYPES = {
    "chat": """
        allowed_token_ids=l bad_words=l chat_template_kwargs=o documents=L logit_bias=o logprob_token_ids=l messages=l
        repetition_detection=o response_format=o stop=ls stop_token_ids=l stream_options=o structured_outputs=o
        structured_outputs.choice=l structured_outputs.json=os tool_choice=os tools=L tools.function=o
        tools.function.parameters=o vllm_xargs=o
    """,
    "completion": """
        allowed_token_ids=l bad_words=l logit_bias=o logprob_token_ids=l prompt=ls repetition_detection=o
        response_format=o stop=ls stop_token_ids=l stream_options=o structured_outputs=o structured_outputs.choice=l
        structured_outputs.json=os vllm_xargs=o
    """,
    "response": """
        chat_template_kwargs=o include=l input=ls logit_bias=o stop=ls stop_token_ids=l structured_outputs=o
        structured_outputs.choice=l structured_outputs.json=os tools=l vllm_xargs=o
    """,
    "tokenize_text": """
    """,
    "tokenize_chat": """
        chat_template_kwargs=o messages=l tools=L tools.function=o tools.function.parameters=o
    """,
    "detokenize": """
        tokens=l
    """,
}


def _in(release: str, spec: str) -> bool:
    first, _, last = spec.partition("@")[2].partition("..")
    return not first or RELEASES.index(first) <= RELEASES.index(release) <= RELEASES.index(last)


FIELDS: dict[str, dict[str, frozenset[str]]] = {
    model: {
        release: frozenset(spec.partition("@")[0] for spec in specs.split() if _in(release, spec))
        for release in RELEASES
    }
    for model, specs in _SPECS.items()
}
"""Model → release → names."""

TYPES: dict[str, dict[str, str]] = {
    model: dict(spec.split("=") for spec in specs.split()) for model, specs in _TYPES.items()
}
"""Model → path of a field → what any release takes for it beside null: `o` an object, `l` a list, `L` a list of
objects, `s` a string, `n` a number or a boolean. Those only for which a list or an object is taken."""
