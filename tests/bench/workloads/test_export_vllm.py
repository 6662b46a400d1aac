"""Rows for `vllm bench serve --dataset-name custom_image`."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys

import pytest

from bench.record import ROOT
from bench.workloads.exports import export_vllm
from bench.workloads.images import Images
from bench.workloads.requests import ClosedLoop, Poisson, Trace
from tests.bench.workloads.exports import REQUESTS, UNTIMED, rows


def test_a_row_is_the_content_of_a_message_with_pictures_as_data_urls(tmp_path):
    pictures = Images(tmp_path / "cache")
    export_vllm(REQUESTS, pictures, tmp_path / "out")

    for row, request in zip(rows(tmp_path / "out"), REQUESTS, strict=True):
        *shown, text = row.pop("content")
        assert row == {}
        assert text == {"type": "text", "text": request.text}
        assert [part["image_url"]["url"] for part in shown] == [pictures.data_url(one) for one in request.images]
        assert {part["type"] for part in shown} <= {"image_url"}


@pytest.mark.parametrize(
    ("arrivals", "flags"),
    [
        (Poisson(4), ["--request-rate", "4"]),
        (ClosedLoop(8), ["--max-concurrency", "8"]),
    ],
)
def test_the_command_has_the_arrivals_the_seed_and_the_length(tmp_path, arrivals, flags):
    done = export_vllm(UNTIMED, Images(tmp_path / "cache"), tmp_path / "out", arrivals, seed=3)
    words = shlex.split(done.command)

    assert words[-len(flags) :] == flags
    for flag, value in (("--num-prompts", "3"), ("--custom-output-len", "64"), ("--seed", "3")):
        assert words[words.index(flag) + 1] == value
    assert {"--ignore-eos", "--disable-shuffle"} <= set(words)


def test_what_vllm_cannot_keep_is_said(tmp_path):
    uneven = [UNTIMED[0], *(type(UNTIMED[1])("x", "q", (), 9, 1, pace=2.0) for _ in range(1))]
    done = export_vllm(uneven, Images(tmp_path / "cache"), tmp_path / "out", Trace([0.0, 1.0]))

    said = " ".join(done.notes)
    assert "same length: 64 tokens" in said and "draws arrivals itself" in said and "bursts of arrivals" in said


READ = """
import json, sys
from vllm.benchmarks.datasets import CustomImageDataset
loaded = CustomImageDataset(dataset_path=sys.argv[1], disable_shuffle=True, random_seed=0)
found = loaded.sample(tokenizer=None, num_requests=3, output_len=64, no_oversample=True)
print("READ" + json.dumps([one.prompt for one in found]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_itself_reads_the_rows(tmp_path):
    pictures = Images(tmp_path / "cache")
    done = export_vllm(REQUESTS, pictures, tmp_path / "out")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "epd_serve/engine/site")}  # repairs torchvision on CPU
    ran = subprocess.run(
        [sys.executable, "-c", READ, str(done.files[0])], env=environment, capture_output=True, text=True, timeout=600
    )

    assert "READ" in ran.stdout, ran.stderr
    prompts = json.loads(ran.stdout.partition("READ")[2])
    assert [prompt[-1]["text"] for prompt in prompts] == [request.text for request in REQUESTS]
    assert [[part["image_url"]["url"] for part in prompt[:-1]] for prompt in prompts] == [
        [pictures.data_url(picture) for picture in request.images] for request in REQUESTS
    ]
