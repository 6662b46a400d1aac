"""`python -m epd_serve.sim`: one simulated stage."""

from epd_serve.sim.main import main

if __name__ == "__main__":
    raise SystemExit(main())
