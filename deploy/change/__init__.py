"""How one layout becomes another while requests are served: what may begin now, and what is short. Pure."""
