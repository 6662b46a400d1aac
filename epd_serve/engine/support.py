"""Which features of vLLM a stage may be started with: supported, with the test that shows it, or refused by name.

One table, `FEATURES`: `docs/reference/support.md` is made from it, and a stage is held against it when its
configuration is known, before a model is loaded (`stage_main.py`). What is refused is refused only where it
meets our connectors: a monolith, and an instance that prefills and decodes without features from elsewhere, may do all
that vLLM does.
Pure: vLLM's configuration is read by its names, which 0.23 and 0.32 share but where noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from epd_serve.errors import ConfigError
from epd_serve.model_support import why_not_encoder_free
from epd_serve.stage_flags import WITHOUT_ENCODER

KV_CONNECTOR = "GroupedKVConnector"


class Meets(Enum):
    """What of ours a refused feature must not meet. The value completes "refused where a stage …"."""

    KV = "sends or takes KV"
    SENT_KV = "sends KV"
    TRANSFERS = "sends or takes KV or features"
    TAKEN_FEATURES = "takes features"

    def touches(self, config: Any) -> bool:
        """Whether a stage of this configuration does, by what its command line gives our connectors (`argv.py`).

        `--kv-offloading-size` has vLLM make a configuration of its own, or put its connector into ours, and keep the
        rest (`VllmConfig._post_init_kv_transfer_config`).
        """
        kv, features = config.kv_transfer_config, getattr(config, "ec_transfer_config", None)
        of_ours = kv is not None and "epd" in kv.kv_connector_extra_config
        if self is Meets.TAKEN_FEATURES:
            return features is not None and bool(features.is_ec_consumer)
        if self is Meets.SENT_KV:
            return of_ours and bool(kv.is_kv_producer)
        return of_ours or (self is Meets.TRANSFERS and features is not None)


@dataclass(frozen=True)
class Refusal:
    """A setting that no stage starts with that `meets` this.

    Attributes:
        setting: `--flag value` as the configuration has it, or "" where it does not ask for the feature.
        why: what would go wrong, or that nothing shows it right. instead: what to do about the flag.
    """

    flag: str
    meets: Meets
    setting: Callable[[Any], str]
    why: str
    instead: str = "remove it"


@dataclass(frozen=True)
class Feature:
    """One row. Supported as far as `tests` (`path::name`) show, refused where a `refusal` says so; Markdown `notes`.

    Without either it is untested, and the notes say why it may do.
    """

    name: str
    tests: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: str = ""


def _size(flag: str) -> Callable[[Any], str]:
    """Of a parallelism: in use where it is not 1. 0.23 lacks some."""
    name = flag[2:].replace("-", "_")

    def setting(config: Any) -> str:
        size = getattr(config.parallel_config, name, 1)
        return f"{flag} {size}" if size != 1 else ""

    return setting


def _switch(flag: str, part: str, name: str) -> Callable[[Any], str]:
    return lambda config: flag if getattr(getattr(config, part), name, False) else ""


def _drafter(config: Any) -> str:
    chosen = config.speculative_config
    method = "" if chosen is None else str(chosen.method)
    return f"--speculative-config method {method}" if method not in ("", "ngram") else ""


def _cache_dtype(config: Any) -> str:
    dtype = str(config.cache_config.cache_dtype)
    known = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    return "" if dtype in known else f"--kv-cache-dtype {dtype}"


def _pruned(config: Any) -> str:
    rate = getattr(getattr(config.model_config, "multimodal_config", None), "video_pruning_rate", None)
    return f"--video-pruning-rate {rate}" if rate else ""


def _needs_encoder(config: Any) -> str:
    """A consumer without its encoder that could not do without. vLLM 0.32 says of each whether it takes metadata."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if not getattr(multimodal, "language_model_only", False):
        return ""
    architecture = next(iter(config.model_config.architectures), "")
    why = why_not_encoder_free(architecture, None)
    if not hasattr(multimodal, "allow_missing_mm_embeddings"):
        why = "this vLLM takes no item without its pixels"
    return f"{WITHOUT_ENCODER} ({why})" if why else ""


def _full_graphs(config: Any) -> str:
    mode = getattr(config.compilation_config.cudagraph_mode, "name", "")
    return "--compilation-config cudagraph_mode FULL" if mode == "FULL" else ""


def _other_connector(config: Any) -> str:
    connector = config.kv_transfer_config.kv_connector
    return "" if connector == KV_CONNECTOR else f"--kv-offloading-size (connector {connector})"


def _parallelism(flag: str, why: str) -> Refusal:
    return Refusal(flag, Meets.TRANSFERS, _size(flag), why)


_RANKS = "transfers join the tensor-parallel workers of one engine to those of another; other ranks would be mistaken"
_UNTESTED = "no test shows it together with transfers"
_FEATURE_TESTS = "tests/e2e/test_vllm_features.py::"
_KEPT_WHOLE = {"FullAttentionSpec", "MLAAttentionSpec"}
_NOT_KEPT_WHOLE = {"HiddenStateCacheSpec", "RSWASpec", "SinkFullAttentionSpec"}
"""vLLM's subclasses of those that are not: what a drafter reads, blocks dropped behind a window, blocks of sinks that
no request owns. Others are a platform's own layout of the same, as vllm-ascend's `AscendMLAAttentionSpec`."""
_GROUPS = "--kv-transfer-config"  # made by the layout: the way out is another layout

FEATURES: tuple[Feature, ...] = (
    Feature(
        "Prefix caching",
        (
            _FEATURE_TESTS + "test_prefill_sends_only_what_decode_does_not_hold",
            "tests/e2e/test_layouts.py::test_the_same_picture_again_gives_the_same_answer",
        ),
        notes="D asks for what it does not hold; what P's cache holds is sent like the rest.",
    ),
    Feature("Chunked prefill", (_FEATURE_TESTS + "test_a_prompt_that_prefill_computes_in_chunks_arrives_whole",)),
    Feature(
        "Prefill up to the first image that is not encoded yet",
        (
            "tests/e2e/test_partial_prefill.py::test_what_comes_before_an_awaited_image_is_prefilled_meanwhile",
            "tests/epd_serve/engine/ec/test_partial_prefill.py::"
            "test_what_comes_before_an_awaited_image_is_computed_meanwhile",
        ),
        notes="One request at a time. It waits for all its images with a `seed`, which vLLM cannot draw in chunks on "
        "CPUs, and where chunked prefill is off, with speculative decoding, in models with state-space layers or of "
        "encoder and decoder, with `--max-num-seqs 1`, and with KV cache for one request of maximal length only.",
    ),
    Feature(
        "Preemption",
        (
            "tests/e2e/test_preemption.py::test_prompts_that_prefill_preempts_arrive_whole",
            "tests/e2e/test_preemption.py::test_pictures_that_decode_preempts_are_seen_again",
        ),
    ),
    Feature(
        "Asynchronous scheduling",
        ("tests/epd_serve/engine/kv/test_decode_scheduler.py::test_ready_waits_for_the_step_in_flight",),
        notes="CPU: vLLM has none. CUDA, NPU: by that test and on a fake device; no card has run it here.",
    ),
    Feature(
        "Graphs of decode steps, compiled pieces of prefill steps",
        (
            "tests/epd_serve/engine/test_stage_config.py::test_no_role_is_forced_to_piecewise_graphs",
            "tests/epd_serve/engine/kv/test_sender_packets.py::"
            "test_a_step_is_sent_whole_however_many_layers_were_announced",
        ),
        (
            Refusal(
                "--compilation-config",
                Meets.SENT_KV,
                _full_graphs,
                "prefill steps would run as one graph, which calls no hook after a layer, so no KV would leave early",
                "use FULL_AND_PIECEWISE (vLLM's default) or FULL_DECODE_ONLY",
            ),
        ),
        notes="Not on CPU, which has no graphs. A step that does run as one full graph is sent whole at its end.",
    ),
    Feature(
        "Speculative decoding by n-grams",
        (_FEATURE_TESTS + "test_what_decode_guesses_by_ngrams_does_not_change_the_answer",),
    ),
    Feature(
        "Speculative decoding by MTP, EAGLE, draft models",
        refusals=(
            Refusal(
                "--speculative-config",
                Meets.KV,
                _drafter,
                f"a drafter has KV of its own, and {_UNTESTED}",
                "use method ngram, or a layout that hands over no KV (PD, E-PD)",
            ),
        ),
    ),
    Feature(
        "LoRA",
        refusals=(
            Refusal(
                "--enable-lora",
                Meets.TRANSFERS,
                lambda config: "--enable-lora" if config.lora_config is not None else "",
                "neither a prompt's hash nor a feature's key says which adapter computed it",
            ),
        ),
    ),
    Feature(
        "FP8 KV cache",
        (
            _FEATURE_TESTS + "test_kv_of_one_byte_numbers_means_the_same_at_decode",
            "tests/epd_serve/engine/kv/test_regions.py::test_one_byte_numbers_say_which_they_are",
        ),
        (
            Refusal(
                "--calculate-kv-scales",
                Meets.KV,
                _switch("--calculate-kv-scales", "cache_config", "calculate_kv_scales"),
                "every instance would compute scales of its own, and read the other's KV with them",
                "take a checkpoint with scales, or none",
            ),
        ),
        notes="With the checkpoint's scales or none: both ends have the same. P and D must be told the same type.",
    ),
    Feature(
        "INT8, INT4, NVFP4 and other KV caches whose scales lie in the cache",
        refusals=(Refusal("--kv-cache-dtype", Meets.KV, _cache_dtype, _UNTESTED, "use auto, bfloat16 or fp8"),),
    ),
    Feature(
        "Sliding window, hybrid KV groups, Mamba",
        ("tests/epd_serve/engine/kv/test_connector.py::test_one_group_of_full_attention_is_taken",),
        (
            Refusal(
                _GROUPS,
                Meets.KV,
                lambda config: "",  # known when vLLM has laid out its cache: `check_kv_groups`
                "only the first group of blocks is handed over, and only full attention keeps all of them",
                "use a layout that hands over no KV (PD, E-PD)",
            ),
        ),
        notes="Refused when the model is loaded, as only then its KV groups are known. Windows in some layers, full "
        "attention in others: taken, vLLM then keeps the whole KV of all layers in one group. Untested.",
    ),
    Feature(
        "MLA",
        ("tests/epd_serve/engine/kv/test_worker.py::test_a_cache_without_heads_arrives_whole_at_every_rank",),
        notes="DeepSeek V3.2 on CUDA: vLLM calls no hook after a layer of the indexer's cache, so a step's KV leaves "
        "at its end, and does not overlap with computing.",
    ),
    Feature(
        "Kernel blocks smaller than the scheduler's",
        (
            "tests/epd_serve/engine/kv/test_regions.py::"
            "test_a_block_of_the_scheduler_is_the_kernels_blocks_that_it_consists_of",
        ),
    ),
    Feature(
        "Video pruning (EVS)",
        refusals=(
            Refusal(
                "--video-pruning-rate",
                Meets.TRANSFERS,
                _pruned,
                "what is dropped moves the positions of all after it, which only who reads the features works out "
                "anew: decode would go on at others",
            ),
        ),
    ),
    Feature(
        "P, D and PD without the encoder (`--encoder-free`)",
        (
            "tests/e2e/test_layouts.py::test_greedy_tokens_equal_the_monoliths",
            "tests/e2e/test_models.py::test_tokens_are_the_same_without_the_encoder_at_p_and_d",
            "tests/e2e/test_encoder_free.py::test_a_feature_that_is_lost_is_encoded_again",
        ),
        (
            Refusal(
                WITHOUT_ENCODER,
                Meets.TAKEN_FEATURES,
                _needs_encoder,
                "items would have to come with their pixels, which only an encoder makes something of",
                "leave --encoder-free away",
            ),
        ),
        notes="Families: [the list](models.md), column *encoder-free*. A stage gets metadata alone; DeepStack's rows "
        "are split by one hook (`epd_serve/engine/encoder_free.py`).",
    ),
    Feature(
        "Micro-batches (dual batch overlap)",
        refusals=(
            Refusal(
                "--enable-dbo",
                Meets.KV,
                lambda config: "--enable-dbo" if getattr(config.parallel_config, "use_ubatching", False) else "",
                "hooks after a layer come once per micro-batch, the first before the layer's KV is whole",
            ),
        ),
    ),
    Feature(
        "Tensor parallelism, of different sizes at P and D", ("tests/e2e/test_tp.py::test_heads_find_their_ranks",)
    ),
    Feature("Pipeline parallelism", refusals=(_parallelism("--pipeline-parallel-size", _RANKS),)),
    Feature(
        "Data parallelism inside an instance",
        refusals=(_parallelism("--data-parallel-size", _RANKS),),
        notes="Use more instances (`2P-D`): the proxy spreads requests over them.",
    ),
    Feature(
        "Expert parallelism",
        notes="Divides experts among the tensor-parallel workers of one engine, and no KV: each holds the heads that "
        "it holds without.",
    ),
    Feature(
        "Context parallelism",
        refusals=tuple(_parallelism(f"--{part}-context-parallel-size", _RANKS) for part in ("decode", "prefill")),
    ),
    Feature(
        "Sleep mode",
        refusals=(
            Refusal(
                "--enable-sleep-mode",
                Meets.TRANSFERS,
                _switch("--enable-sleep-mode", "model_config", "enable_sleep_mode"),
                "memory that is given back and taken anew stays registered for transfers where it was",
            ),
        ),
        notes="Not on CPU, where vLLM has none.",
    ),
    Feature(
        "KV offloading, other KV connectors",
        refusals=(
            Refusal(
                "--kv-offloading-size",
                Meets.KV,
                _other_connector,
                "vLLM puts another connector in the place of ours, and no KV would be handed over",
            ),
        ),
        notes="vLLM 0.32 ends such a stage before we can: it looks for its own connector in our module.",
    ),
    Feature(
        "A stream's first token from P, the rest from D",
        (
            "tests/e2e/test_first_token.py::test_whatever_is_asked_of_the_answer",
            "tests/e2e/test_first_token.py::test_a_stage_that_dies_after_the_first_token_costs_the_client_nothing",
        ),
        notes="One answer to one prompt, of `/v1/chat/completions` and `/v1/completions`, where P and D have the same "
        "flags but for those of speed. It waits for D with tools, thinking budgets, several answers, `/v1/responses`; "
        "where the stages parse chats (`--reasoning-parser`, `--tool-call-parser`), which hold text back, all chats "
        "do; so does a token that may begin a stop string, or is part of a character. Off with "
        "`--speculative-config` or `--logits-processors`: vLLM then takes no logits processor of ours, with which D is "
        "made to sample P's token. `max_tokens: 1`, and what stops at its first token, P answers alone. vLLM 0.32's "
        "newer model runner (CUDA): by unit tests.",
    ),
    Feature(
        "A stream that goes on at another instance",
        (
            "tests/e2e/test_go_on.py::test_tokens_that_are_made_prompt",
            "tests/e2e/test_go_on.py::test_tokens_that_are_sampled_again",
            "tests/e2e/test_go_on.py::test_a_pair_that_samples_tokens_again",
            "tests/e2e/test_faults.py::test_a_stream_that_loses_its_stage_halfway_goes_on",
        ),
        notes="One answer to one prompt, of `/v1/chat/completions` and `/v1/completions`; what goes on, and how: "
        "[failures](../guides/failures.md#streams-that-go-on). Off with `--speculative-config` or "
        "`--logits-processors`, as above. vLLM 0.32's newer model runner (CUDA): by unit tests.",
    ),
    Feature("Structured output", ("tests/e2e/test_openai.py::test_a_json_schema_is_kept_to",)),
    Feature("Tool parsers", ("tests/e2e/test_openai.py::test_a_named_tool_is_called",)),
    Feature("Reasoning parsers", (_FEATURE_TESTS + "test_reasoning_is_parsed_as_plain_vllm_parses_it",)),
)


def check_stage(config: Any) -> None:
    """Hold the configuration of one stage against the table.

    Args:
        config: vLLM's `VllmConfig`, or what has its names.

    Raises:
        ConfigError: one line: what is refused, why, and what to do about the flag.
    """
    for feature, refusal in refusals():
        setting = refusal.setting(config) if refusal.meets.touches(config) else ""
        if setting:
            raise ConfigError(_line(setting, feature, refusal), param=refusal.flag)


def check_kv_groups(kv_cache_config: Any) -> None:
    """Hold the KV cache that vLLM has laid out against the table: one group of blocks, of full attention.

    Raises:
        ConfigError: other groups, of which some blocks would not be handed over, or freed while they are.
    """
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec) for group in groups for spec in _specs(group)}
    if len(groups) == 1 and all(_is_kept_whole(kind) for kind in kinds):
        return
    feature, refusal = next(both for both in refusals() if both[1].flag == _GROUPS)
    setting = f"{len(groups)} KV groups of {', '.join(sorted(kind.__name__ for kind in kinds))}"
    raise ConfigError(_line(setting, feature, refusal), param=refusal.flag)


def refusals() -> Iterator[tuple[Feature, Refusal]]:
    """All that is refused."""
    return ((feature, refusal) for feature in FEATURES for refusal in feature.refusals)


def document() -> str:
    """`docs/reference/support.md`."""
    rows = [f"| {row.name} | {_status(row)} | {_shown(row)} | {row.notes} |" for row in FEATURES]
    return "\n".join((_HEAD, *rows, ""))


_HEAD = """# vLLM's features under EPD-Serve

Made by `python -m epd_serve.engine.support`, from the table that a stage checks when it starts. *Supported*: the named
test shows it. *Untested*: taken, as reading shows nothing of ours in its way, but no test does. *Refused*: the stage
ends before it loads a model, with exit code 2 and one line that names the flag and the way out. KV groups are known
only when the model is loaded: what is refused for them ends vLLM's engine then, with that line as its error, which the
launcher shows. A monolith (`TP1`), and what prefills and decodes without features from elsewhere, is plain vLLM:
nothing is refused there.

| Feature | Status | Shown by, or refused flag | Notes |
|---|---|---|---|"""


def _status(row: Feature) -> str:
    where = " or ".join(dict.fromkeys(refusal.meets.value for refusal in row.refusals))
    refused = f"refused where a stage {where}"
    if not row.refusals:
        return "supported" if row.tests else "untested"
    return f"supported; in part {refused}" if row.tests else refused


def _shown(row: Feature) -> str:
    tests = [f"`{test}`" for test in row.tests]
    return "<br>".join((*tests, *(f"`{refusal.flag}`: {refusal.why}; {refusal.instead}" for refusal in row.refusals)))


def _line(setting: str, feature: Feature, refusal: Refusal) -> str:
    return f"{setting}: {feature.name}: refused where a stage {refusal.meets.value}: {refusal.why}; {refusal.instead}"


def _specs(spec: Any) -> list[Any]:
    """Of a group: its own, or those of its layers where they differ in size alone."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _is_kept_whole(kind: type) -> bool:
    """By the names of its bases: vLLM's own classes are not imported here."""
    names = {base.__name__ for base in kind.__mro__}
    return bool(names & _KEPT_WHOLE) and not names & _NOT_KEPT_WHOLE


if __name__ == "__main__":
    print(document(), end="")
