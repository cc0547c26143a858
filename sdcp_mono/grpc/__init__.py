"""Between our own roles, split over processes: each client is a port, each service serves one.

Never run a script from inside this folder: it would find this package where it wants gRPC.
"""
