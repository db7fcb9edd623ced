"""The runner: scenarios, agent launching, admission, evaluation."""
