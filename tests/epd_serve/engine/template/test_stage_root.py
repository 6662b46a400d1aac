"""What the root of a stage hands to a process that it forks. (Its life: `tests/deploy/agent/test_template.py`.)"""

from __future__ import annotations

import os

import pytest

from epd_serve.engine.template.stage_root import Fork, StageRoot, ask_for_process
from epd_serve.packets import packet_pair


def test_a_program_that_a_forked_process_starts_inherits_no_descriptor_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, asking = packet_pair()
    root = StageRoot(requests, {os.getpid(): Fork(asked_by=0, status=-1)})
    monkeypatch.setattr(root, "_fork", lambda fork: 0)  # this is the new process
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with requests, asking:
        ask_for_process(asking, [writer, reader, writer])
        passed = root._on_request()
    assert passed is not None and len(passed) == 2
    assert not any(os.get_inheritable(descriptor) for descriptor in passed)
    for descriptor in (reader, writer, *passed):
        os.close(descriptor)
