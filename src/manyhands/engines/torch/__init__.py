"""Workers under torch.distributed."""
