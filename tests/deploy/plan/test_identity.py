"""Flags that change what an encoder makes are part of every key; nothing else is."""

from __future__ import annotations

import pytest

from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.proxy_settings import model_identity, processing_digest, processing_flags


def test_a_flag_is_the_same_however_it_is_written() -> None:
    ways = [
        ["--mm-processor-kwargs", '{"a": 1, "b": 2}', "--seed", "3"],
        ['--mm_processor_kwargs={"b":2,"a":1}'],
        ["--mm-processor-kwargs", "{}", "--mm-processor-kwargs", '{"a":1,"b":2}'],
    ]
    assert len({processing_digest([words]) for words in ways}) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--mm-processor-kwargs", '{"max_pixels": 5}'],
        ["--mm-processor-kwargs.max_pixels", "5"],
        ["--media-io-kwargs", '{"video": {"fps": 1}}'],
        ["--dtype", "float16"],
        ["--revision", "main"],
        ["-q", "awq"],
        ["--hf-overrides", "{}"],
    ],
)
def test_what_changes_features_changes_the_identity(words: list[str]) -> None:
    assert processing_digest([words]) not in ("", processing_digest([["--dtype", "bfloat16"]]))


def test_other_flags_and_the_number_of_instances_do_not() -> None:
    assert processing_digest([["--max-num-seqs", "4"], []]) == ""
    assert processing_digest([["--dtype", "half"]]) == processing_digest([["--dtype", "half"]] * 3)
    assert processing_flags(["--max-num-seqs", "4"]) == []


def test_the_identity_of_a_deployment_takes_its_stage_args() -> None:
    def identity(*stage_args: str) -> str:
        return model_identity(draw(DeployConfig(device="cpu", stage_args=stage_args))).revision

    plain = identity()
    assert plain and identity("P:--max-num-seqs 4") == plain
    changed = identity("all:--mm-processor-kwargs '{\"max_pixels\": 50000}'")
    assert changed.startswith(plain + "+")
