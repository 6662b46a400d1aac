"""The MM Store: features by key. `arena/` keeps them on a host, `mooncake/` joins hosts, `feature_pool` is the two."""
