"""A stage or a proxy started by itself: to debug one, or in front of stages that somebody else runs."""
