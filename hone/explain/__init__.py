"""What became of a rollout and its tokens, and why, in sentences for people."""
