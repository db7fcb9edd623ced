"""From stored rollouts to scenario sets and to conversations for supervised fine-tuning."""
