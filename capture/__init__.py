"""The shared vocabulary and the durable store."""
