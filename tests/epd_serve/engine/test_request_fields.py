"""What was read of vLLM's requests by syntax is what the installed vLLM validates by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import epd_serve
from proxy.fields.rules import known_release
from proxy.fields.vllm_fields import FIELDS, RELEASES
from tests.contract.request_fields import MODELS

ROOT = Path(__file__).parents[3]
SITE = Path(epd_serve.__file__).with_name("engine") / "site"
ASK = """
import importlib, json, sys, vllm
told = {}
for model, dotted in json.loads(sys.argv[1]).items():
    module, _, name = dotted.rpartition(".")
    fields = getattr(importlib.import_module(module), name).model_fields
    told[model] = sorted(field.alias or own for own, field in fields.items())
print(json.dumps([vllm.__version__, told]))
"""


def test_the_fields_read_from_the_wheel_are_those_of_the_installed_vllm() -> None:
    said = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(MODELS)],
        env={**os.environ, "PYTHONPATH": str(SITE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    version, told = json.loads(said.stdout.splitlines()[-1])
    assert version.startswith(RELEASES), "the installed vLLM is one whose wheel was read"
    release = known_release(version)
    assert told == {model: sorted(FIELDS[model][release]) for model in MODELS}


def test_vllm_s_models_crash_on_no_body_and_take_none_whose_types_are_refused() -> None:
    """In each generation, where it is installed: `make test`, `make test-vllm023`."""
    said = subprocess.run(
        [sys.executable, "-m", "tests.epd_serve.engine.validated_bodies", "3000", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    judged = json.loads(said.stdout.splitlines()[-1])
    assert judged["crashes"] == [] and judged["strict"] == []
    assert judged["taken"] > 300 and judged["mistyped"] > 100, "neither of them is for want of bodies"
