"""The command line, the configuration and the supervisor: composes the rooms into processes."""
