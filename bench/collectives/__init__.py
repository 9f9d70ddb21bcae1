"""Allreduce in CPU memory, beside torch.distributed gloo and beside what the memory allows."""
