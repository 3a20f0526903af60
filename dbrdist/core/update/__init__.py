"""Update rules and optimizers over flat memory."""
