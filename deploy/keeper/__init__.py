"""Who a launch's processes are children of: starts, adopts and collects them for those who decide what runs."""
