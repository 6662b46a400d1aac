"""The HTTP application: its routes, the exchange with one client, the OpenAPI document, status, the admin listener.

May import every other room of the proxy but `workers`, which runs several of it.
"""
