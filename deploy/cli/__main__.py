"""`python -m deploy.cli`."""

from deploy.cli.command import main

if __name__ == "__main__":
    raise SystemExit(main())
