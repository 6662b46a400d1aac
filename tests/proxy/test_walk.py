"""How many files of the proxy one request passes through: who follows it reads no more than those."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import proxy
from tests.proxy.fakes import cluster, data_url, encodes, image_file

ROOT = str(Path(proxy.__file__).parent) + "/"
APART = ("workers/", "server/")
MOST = 40
"""Threads that load media among them. 72 and more before there was one context."""


async def test_a_chat_with_an_image_passes_through_few_files() -> None:
    passed: set[str] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            passed.add(name.removeprefix(ROOT))

    threading.setprofile(called)
    try:
        async with cluster("E0", "P0", "D0") as c:
            c["E0"].usual = encodes()
            await c.ask(data_url(image_file(64, 64)), stream=True)  # what is made once is made now
            await c.idle()
            passed.clear()
            sys.setprofile(called)
            response = await c.ask(data_url(image_file(72, 72)), stream=True)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert response.status_code == 200 and c["E0"].calls and c["P0"].calls
    walked = sorted(name for name in passed if not name.startswith(APART))
    assert {"pipeline.py", "media/images.py", "generate/attempt.py"} <= set(walked)
    assert len(walked) <= MOST, " ".join(walked)
