"""gRPC over HTTP/2 for one local service: sans-I/O connection, HPACK, and a small asyncio server.

Why not grpcio alone: its asynchronous server takes 0.3 to 0.6 ms of CPU per call on the machine where this was measured,
five times what a Prepare itself takes, and 50 callers at once wait for each other's. What is served here is one unix
socket for root's own containerd, unary and server-streaming calls of known methods, without TLS and compression: a small
part of the protocols. Both transports serve the same handlers and pass the same conformance suite.
"""
