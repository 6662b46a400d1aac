"""One request's own state: the parsed body, its deadline and cancellation, and what is sent to its client.

May import `fields` and `config` only.
"""
