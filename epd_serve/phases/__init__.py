"""Where the time of a request goes: stamps of proxy and stages, and what follows from them. Reads files, no more.

`epd-serve trace` draws them, `epd-bench` counts them.
"""
