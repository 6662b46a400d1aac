"""Example proxies of vLLM and vllm-ascend over the stages of a layout of ours: baselines for our proxy.

The scripts are files that the user gives (`--peer-vllm`, `--peer-ascend`) and run as they are. The layout is served as
ever; its own proxy idles beside, and says what the stages do. Which layouts: `bench/layouts/entry.py`, `WHY_NO_PEER`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.client.target import Target
from bench.example_proxies import ASCEND, VLLM, running
from bench.layouts.entry import PEERS, Entry, How
from bench.layouts.up import Up
from bench.served import Stage
from deploy.ports import free_ports

_SCRIPTS = {How.PEER_VLLM: VLLM, How.PEER_ASCEND: ASCEND}


@contextlib.contextmanager
def over(entry: Entry, script: Path, up: Up, stages: Sequence[Stage]) -> Iterator[Up]:
    """`up`, but through the example proxy at `script`.

    Raises:
        StageError: it did not start; with the end of its log.
    """
    urls = {role: [f"http://127.0.0.1:{stage.port}" for stage in stages if stage.role == role] for role in ("E", "PD")}
    (port,) = free_ports(1)
    argv = _SCRIPTS[entry.how].argv(script.resolve(), port, urls["E"], urls["PD"])
    with running(PEERS[entry.how], port, argv) as rival:
        yield replace(up, target=Target(rival.url), traces=None)
