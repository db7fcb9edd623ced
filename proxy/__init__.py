"""The request path: agents in, upstreams out."""
