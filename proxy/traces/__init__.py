"""OpenTelemetry: requests that have ended as spans, sent to a collector. Imported only where that is asked for.

Nothing of it happens while a request runs, but that its calls carry a trace context (`proxy/records/trace_context.py`).
"""
