"""One module for each verb: `add_arguments(parser)` and `run(arguments) -> exit status`."""
