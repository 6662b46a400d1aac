"""Who may go to the stages and when: the queues, their capacity, the gate that waits, draining at the end.

May import `request` and `registry` and what is below those; not `media`, whose bytes `tenants` bounds.
"""
