"""What a sequence of events needs and takes: bytes by step, seconds, stalls. Compiled, since policies ask it thousands of times."""
