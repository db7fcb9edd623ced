"""What each wire API looks like; pure."""
