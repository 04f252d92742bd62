"""All-reduce and tensor fusion for data-parallel training."""
