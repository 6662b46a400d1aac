"""Stages that start in seconds: every process of a stage is forked from one that has imported what all of them need.

Importing torch, vLLM and a model takes ten seconds of a core, and a stage has two processes: API server and EngineCore;
with several ranks, workers, too. So one process per launch, the *template*, does it once (`__main__.py`, `imports.py`).
It never touches a device nor runs a thread, because neither survives a fork.

    agent ──stage's argv, environment, log──▶ template ──fork, fork──▶ stage root ──fork──▶ API server
      ▲                                                                 │  ▲  ├──fork──▶ EngineCore, for the API server
      └──────────────── pid; then the agent says "go" ──────────────────┘  │  └──fork──▶ workers, for EngineCore
                                                                           └─ "fork me a process" (`context.py`)

The *stage root* (`stage_root.py`) leads the stage's process group. It stays single-threaded, so that what it forks for
the others, which have threads, is as clean as what the template forked. It is forked twice, and so no child of the
template but of the launch's root: a stage that runs needs neither template nor agent. Whatever the
template is not sure to do right is done the ordinary way: by a new interpreter.
"""
