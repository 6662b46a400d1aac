"""This machine as a launch uses it: processes, ports, run directories, signals, event loop."""
