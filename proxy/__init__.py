"""The front door of a deployment: takes OpenAI requests and has the stages answer them.

A request's way, from the top: `server` (a connection) → `http` (one exchange on it) → `pipeline.py` (the steps in
order) → `media` (load it) → `encode` → `generate`, each step behind a queue of `admission`, each call to a stage
by way of `stages`. What the steps ask: `registry` (which instances there are, and how loaded), `routing` (which of
them to take), `request` (one request's own state), `tenants` (who asks, and their limits), `fields` (what a body
may hold), `config` (the settings). `workers` runs all this as processes behind one port.

Rooms import downwards only, in the order of the contract in pyproject.toml. None imports vLLM or torch.
"""
