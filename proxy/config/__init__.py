"""The proxy's settings and their bounds, built once by `deploy` and handed down.

May import `fields` and `routing`, for the names that they give.
"""
