"""Tier 2 of the MM Store: a Mooncake Store, which joins hosts."""
