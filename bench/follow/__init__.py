"""How well a follower of the load follows it."""
