"""The encode step: every media item encoded at most once, on the encoders that are soonest done with it.

May import `stages` and every room below that.
"""
