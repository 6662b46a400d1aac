"""Media items: fetched safely, judged by their headers before anything decodes them, and given their keys.

May import `request`, `tenants` and what is below those.
"""
