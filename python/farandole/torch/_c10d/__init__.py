"""Under torch.distributed: the backend of farandole.torch.distributed, and a hook of DDP."""
