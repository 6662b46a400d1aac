"""Where work goes, as pure functions: policies by name, the paths of a layout, the plan of an attempt.

The spread of a request's items over encoders is among them. The simulator runs the same policies and paths. What asks
for plans is `generate/router.py`. May import `fields` only.
"""
