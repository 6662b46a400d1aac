"""Several proxy processes behind one port: the worker, the parent's hub, their messages, and counts they share.

On top of all other rooms, which do not know of it. Processes are started and ended by `deploy/front`.
"""
