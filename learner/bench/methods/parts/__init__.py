"""What several benchmark methods share: the protocol, forward passes, prompts, the training loop, replay."""
