"""The expansion service: beam-llm's transforms for pipelines in other languages and processes."""
