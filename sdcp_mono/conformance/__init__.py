"""The conformance kit: tests any SDCP implementation over the wire by acting as the other roles.

It is a second implementation on purpose: its own CBOR, digests, draws, HTTP/2 and problem types, nothing of the server.
What is asked is in the tables of ``verifier_*``, ``drafter`` and ``router``: one function per requirement.
"""

from sdcp_mono.conformance.kit import Check, Finding, Options
from sdcp_mono.conformance.main import conformance, examine

__all__ = ["Check", "Finding", "Options", "conformance", "examine"]
