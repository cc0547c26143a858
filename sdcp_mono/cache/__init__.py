"""The multi-level cache: objects under leases, draft rows, and the commit log (6.8; design, section 5)."""
