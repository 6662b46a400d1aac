"""One machine of a deployment on several: the process that has all of it as children, started and found by others."""
