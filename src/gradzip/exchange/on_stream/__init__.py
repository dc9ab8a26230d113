"""The stream runner: messages of models on GPUs, whose steps are enqueued on CUDA streams over NCCL."""
