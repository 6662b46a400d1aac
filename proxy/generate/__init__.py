"""The prefill and decode step: which instances, attempt by attempt, until the client has one answer.

May import `encode`, to encode again what got lost, and every room below that. `tokenize.py` is the short way of
requests that no engine works on.
"""
