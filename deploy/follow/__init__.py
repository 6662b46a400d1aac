"""Following the load: which layout is wanted next, from what comes and what there is."""
