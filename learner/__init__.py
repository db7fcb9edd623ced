"""Groups in, adapters out: the only room with torch."""
