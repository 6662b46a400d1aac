"""What runs instances: the protocol, and what implements it."""
