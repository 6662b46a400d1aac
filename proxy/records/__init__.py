"""What becomes of requests: noted once while each runs, then logged, kept for `epd-serve why`, counted for a minute.

May import `config` and `routing` only, and knows nothing of HTTP.
"""
