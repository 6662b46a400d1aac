"""Who asks and how much of the proxy they may take: keys, limits per key, fair shares of memory and of turns.

May import `config` only.
"""
