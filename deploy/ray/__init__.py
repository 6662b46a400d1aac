"""A deployment on the nodes of a Ray cluster. Ray is an optional extra: only this folder imports it, and nothing here
is imported before it is asked for.

Ray says which nodes there are, reserves devices, keeps two kinds of actors alive and carries what these are asked. What
runs on a node is a process of ours (`deploy/node`), and no request of a client ever passes through Ray.
"""
