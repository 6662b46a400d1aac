"""Where work goes, as pure functions: policies by name, the paths of a layout.

The simulator runs the same code. What asks these for the instances of one attempt is `generate/router.py`, what
spreads a request's items over encoders `encode/spread.py`. May import `fields` only.
"""
