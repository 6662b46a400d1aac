"""The clients of `docs/examples` against real stages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.bodies import fresh_prompt
from tests.e2e.serving import MODEL, ROOT, Serving

EXAMPLES = ROOT / "docs" / "examples"
PROMPT = fresh_prompt(804)
epd = pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    PROMPT.picture().save(path)
    return path


def run(launch: Serving, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{launch.url}/v1", "MODEL": MODEL}
    return subprocess.run(
        [str(word) for word in argv], env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@epd
@pytest.mark.promise("openai-sdk")
def test_the_sdk_gets_the_answer_whole_and_streamed(launch: Serving, image: Path) -> None:
    done = run(launch, sys.executable, EXAMPLES / "openai_sdk.py", image, PROMPT.question)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(PROMPT.answer) == 2


@epd
def test_curl_gets_the_answer(launch: Serving, image: Path) -> None:
    done = run(launch, EXAMPLES / "curl.sh", image, PROMPT.question)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == PROMPT.answer


@epd
def test_langchain_gets_the_answer_or_says_what_to_install(launch: Serving, image: Path) -> None:
    done = run(launch, sys.executable, EXAMPLES / "langchain_chat.py", image, PROMPT.question)
    if importlib.util.find_spec("langchain_openai") is None:
        assert done.returncode == 1 and "pip install langchain-openai" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert PROMPT.answer in done.stdout
