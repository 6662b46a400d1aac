"""What a client's body may hold: every field of vLLM's requests with a verdict, and content parts of messages.

Imports no other room. What `/openapi.json` says of bodies (`proxy/http/openapi.py`) rests on these verdicts.
"""
