"""Where work goes, as pure functions: policies by name, the paths of a layout, the plan of an attempt.

The simulator runs the same policies and paths. What asks for plans is `generate/router.py`, what spreads a request's
items over encoders `encode/spread.py`. May import `fields` only.
"""
