"""What a deployment is to be, decided before anything starts: blueprint, wiring, settings of the proxy."""
