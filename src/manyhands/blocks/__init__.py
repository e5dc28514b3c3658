"""Parts for your own distributed loop: weight server, gradient server, shared values."""
