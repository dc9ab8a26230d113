"""The host runner: messages that threads of the host code and send over Gloo, of models on CPUs and on GPUs."""
