"""The authenticated control link between a driver, its executors and its operators.

security, certificates, tokens    who is who: an own authority, mutual TLS 1.3, signed tokens with a role
wire, connection, server, client  frames and messages over one connection a peer
operators                         who may do what; two persons for an eviction
audit                             an append-only log that shows what was changed in it
"""
