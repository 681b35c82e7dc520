"""vLLM: its server's life, a client for it, and Beam model handlers."""
