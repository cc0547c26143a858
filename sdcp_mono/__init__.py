"""Speculative decoding coordinated by a protocol (SDCP, draft-li-mlc-inference-acceleration-00)."""

__version__ = "0.1.0"
