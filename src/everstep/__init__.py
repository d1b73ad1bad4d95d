"""everstep trains PyTorch models through failures and never loses a step."""
