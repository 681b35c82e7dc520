"""Prefix-batched LLM inference for Apache Beam."""
