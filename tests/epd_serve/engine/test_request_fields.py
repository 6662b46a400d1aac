"""What was read of vLLM's requests by syntax is what the installed vLLM validates by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import epd_serve
from deploy.contract.request_fields import MODELS
from proxy.fields.sieve import known_release
from proxy.fields.vllm_fields import FIELDS, RELEASES

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
