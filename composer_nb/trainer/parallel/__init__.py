"""One model on many ranks: meshes, FSDP, expert and context parallelism."""
