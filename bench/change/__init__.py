"""What clients notice of a deployment that is changed, or of whose parts some are killed."""
