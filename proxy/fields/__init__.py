"""What a client's body may hold: every field of vLLM's requests with a verdict, and content parts of messages.

Imports no other room. The front door's schemas (`http/openapi_schemas.py`) rest on these verdicts.
"""
