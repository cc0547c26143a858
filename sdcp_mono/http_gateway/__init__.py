"""SDCP over HTTP/2, mutual TLS and CBOR (5.1): the roles' resources, and clients that are the roles' ports."""
