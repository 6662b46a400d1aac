"""Client connections: the listening socket, HTTP/1.1 by uvicorn, clients that stay idle, clients that leave.

Knows nothing of requests' content and imports no other room.
"""
