"""The built-in model answers the fixed prompts rightly in plain transformers, so the prompts can judge the stages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_serve.demo.pictures import SAMPLES, describe
from tests.e2e.demo_prompts import OTHER_QUESTIONS, PAIRWISE_DIFFERENT, TEXT_ONLY

ROOT = Path(__file__).parents[2]

# A process of its own: torch's threads and torchvision's repair stay out of the test process.
ASK = """
import json, sys
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.demo.pictures import SAMPLES
from tests.e2e.demo_prompts import OTHER_QUESTIONS, PAIRWISE_DIFFERENT, TEXT_ONLY, WHAT

torch.set_num_threads(1)
model_dir = builtin_model_dir()
processor = AutoProcessor.from_pretrained(model_dir)
model = Qwen3VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)

def ask(question, pictures):
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False,
        chat_template=(model_dir / "chat_template.jinja").read_text(),
    )
    inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1]:]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True)

answers = [ask(prompt.question, [prompt.picture()]) for prompt in PAIRWISE_DIFFERENT + OTHER_QUESTIONS]
answers += [ask(question, []) for question, _ in TEXT_ONLY]
answers += [ask(WHAT, [sample.draw()]) for sample in SAMPLES.values()]
json.dump(answers, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs torch and transformers")
def test_the_built_in_model_answers_every_prompt_rightly():
    path = os.pathsep.join([str(ROOT / "epd_serve/engine/site"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    expected = [prompt.answer for prompt in PAIRWISE_DIFFERENT + OTHER_QUESTIONS] + [answer for _, answer in TEXT_ONLY]
    expected += [describe(sample.shapes) for sample in SAMPLES.values()]
    assert json.loads(done.stdout) == expected
