"""EPD-Serve: multimodal serving with Encode, Prefill and Decode apart."""

__version__ = "0.1.0"
