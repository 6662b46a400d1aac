"""What every step needs to call a stage: the HTTP client, bodies, circuits, poison, the retry budget, the job.

May import `admission`, `media`, `request`, `registry` and what is below those. The steps themselves are in `encode`
and `generate`.
"""
