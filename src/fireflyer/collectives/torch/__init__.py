"""What `torch_group`, `torch_join`, `torch_hooks`, `torch_fsdp` and `torch_devices` are made of. Imports torch."""
