"""The page at `/`: what the deployment is and does, and a playground. Static files, and what feeds them.

`static/` has no build step and fetches nothing from elsewhere; the rest here answers it.
"""
