"""Our vLLM plugin (entry-point group `vllm.general_plugins`): vLLM runs it in the API server, EngineCore and workers.

Inert in any vLLM that was not started as one of our stages.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from epd_serve.engine.argv import SHARED_CORES_ENV, STAGE_ENV
from epd_serve.engine.core_share import obey
from epd_serve.engine.idle_steps import sleep_between_idle_steps
from epd_serve.engine.memory_names import name_memory, name_rank_memory
from epd_serve.engine.queue_bell import wait_asleep
from epd_serve.engine.template.context import forked
from epd_serve.engine.worker_start import keep_threads_off_captures, narrow_rendezvous
from epd_serve.engine.worker_threads import rule_threads
from epd_serve.lifeline import die_with_parent, name_process

_SWITCH_S = 0.0005
"""How long a thread that computes in Python keeps others waiting. A feature passes through six threads of two stages
beside the models' threads, and would wait for Python's lock 5 ms at each."""


def register() -> None:
    """Tie EngineCore and workers to the process that made them, workers to their share of cores and to their address,
    shared memory to the stage by its name. vLLM calls it in each process, sometimes twice."""
    if STAGE_ENV not in os.environ:
        return
    for ours in ("epd_serve", "store"):  # our log lines look like vLLM's and carry the process's prefix
        logging.getLogger(ours).handlers = logging.getLogger("vllm").handlers
        logging.getLogger(ours).setLevel(logging.INFO)
        logging.getLogger(ours).propagate = False
    sys.setswitchinterval(_SWITCH_S)
    if SHARED_CORES_ENV in os.environ:
        wait_asleep()
    sleep_between_idle_steps()
    name_memory()
    name_rank_memory()
    obey()
    narrow_rendezvous()
    keep_threads_off_captures()
    rule_threads()  # after `obey`: what is installed last is done first
    parent = multiprocessing.parent_process()
    if forked():  # and dies with the stage's root
        name_process(multiprocessing.current_process().name)
    elif parent is not None:
        die_with_parent(parent.pid)
