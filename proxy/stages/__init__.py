"""What every step needs to call a stage: the HTTP client, bodies, events of streams, circuits, retries, poison, what a
prompt costs, the job.

May import `admission`, `media`, `request`, `registry` and what is below those. The steps themselves are in `encode`
and `generate`.
"""
